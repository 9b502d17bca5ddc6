"""How a dialect is read: text in, events out."""

from typing import Protocol

from dragoman.types import Event


class Reader(Protocol):
    """Fed as the text comes. What it holds back must come out of a later `feed`, or of `finish`."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class Plain:
    """The dialect of models that write text and nothing else: all of it passes through."""

    def feed(self, text: str) -> list[Event]:
        return [Event("text", 0, text)]

    def finish(self) -> list[Event]:
        return []
