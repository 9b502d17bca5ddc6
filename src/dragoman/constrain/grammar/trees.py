"""A grammar in Lark as a tree, and what can be asked of the languages that its terminals are.

A node is itself, not its content: two that look alike are two places in the grammar.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from msgspec import Struct


class Text(Struct, frozen=True, eq=False):
    """Characters that stand for themselves."""

    text: str


class Class(Struct, frozen=True, eq=False):
    """One character of several; `inner` is what an expression has within brackets, or brackets with that."""

    inner: str
    any_case: bool = False

    @property
    def pattern(self) -> str:
        return f"(?i:[{self.inner}])" if self.any_case else f"[{self.inner}]"


class Name(Struct, frozen=True, eq=False):
    """A rule or a terminal."""

    name: str
    line: int


class Sequence(Struct, frozen=True, eq=False):
    parts: "tuple[Node, ...]"


class Choice(Struct, frozen=True, eq=False):
    """Without options it is a language without texts."""

    options: "tuple[Node, ...]"


class Repeat(Struct, frozen=True, eq=False):
    inner: "Node"
    least: int
    most: int | None
    """None: as often as one likes."""


class Both(Struct, frozen=True, eq=False):
    """What is in all of these languages."""

    parts: "tuple[Node, ...]"


class Not(Struct, frozen=True, eq=False):
    inner: "Node"


class Lexeme(Struct, frozen=True, eq=False):
    """In a rule: the terminal that is read here, in one piece."""

    inner: "Node"


Node: TypeAlias = Text | Class | Name | Sequence | Choice | Repeat | Both | Not | Lexeme

EMPTY = Sequence(())
NEVER = Choice(())


class Source(Struct, frozen=True):
    """A whole grammar."""

    rules: Mapping[str, Node]
    terminals: Mapping[str, Node]
    ignored: Node | None = None
    """What may stand between lexemes."""


def sequence(parts: Iterable[Node]) -> Node:
    """Texts that meet are one."""
    found: list[Node] = []
    for part in parts:
        if part is NEVER:
            return NEVER
        for one in part.parts if isinstance(part, Sequence) else (part,):
            if isinstance(one, Text) and found and isinstance(found[-1], Text):
                found[-1] = Text(found[-1].text + one.text)
            else:
                found.append(one)
    if not found:
        return EMPTY
    return found[0] if len(found) == 1 else Sequence(tuple(found))


def choice(options: Iterable[Node]) -> Node:
    found = tuple(option for option in options if option is not NEVER)
    if not found:
        return NEVER
    return found[0] if len(found) == 1 else Choice(found)


def repeat(inner: Node, least: int, most: int | None) -> Node:
    if inner is NEVER or most == 0:
        return NEVER if least else EMPTY
    return Repeat(inner, least, most)
