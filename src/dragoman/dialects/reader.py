"""How a dialect is read: text in, fragments of an answer out."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from dragoman.types import Kind

Fragment: TypeAlias = tuple[Kind, str]


class Reader(Protocol):
    """Fed as the text comes. What it holds back must come out of a later `feed`, or of `close`."""

    def feed(self, text: str) -> Sequence[Fragment]: ...

    def close(self) -> Sequence[Fragment]: ...


class Plain:
    """The dialect of models that write text and nothing else: all of it passes through."""

    def feed(self, text: str) -> Sequence[Fragment]:
        return (("text", text),)

    def close(self) -> Sequence[Fragment]:
        return ()
