"""How a dialect is read: text in, events out."""

from collections.abc import Sequence
from typing import Protocol

from dragoman.types import Event


class Reader(Protocol):
    """Fed as the text comes. What it holds back must come out of a later `feed`, or of `finish`."""

    def feed(self, text: str) -> Sequence[Event]: ...

    def finish(self) -> Sequence[Event]: ...


class Plain:
    """The dialect of models that write text and nothing else: all of it passes through."""

    def feed(self, text: str) -> Sequence[Event]:
        return (Event("text", 0, text),)

    def finish(self) -> Sequence[Event]:
        return ()
