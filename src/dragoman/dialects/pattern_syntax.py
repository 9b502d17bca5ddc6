"""Regular expressions of a model's files, as a program of few instructions.

Only what a regular language has: no back references, no look-behind. What such a program matches is found in
one pass over the text, whatever the pattern is (see pattern.py); Python's own `re` may take years.
"""

import re
from typing import Literal, NamedTuple, NoReturn, TypeAlias

from dragoman.errors import SettingsError

MAX_PATTERN = 1000
MAX_PROGRAM = 4000
MAX_REPEAT = 200

Op: TypeAlias = Literal["char", "split", "jump", "save", "assert", "match"]


class Instruction(NamedTuple):
    op: Op
    what: str = ""
    """Of a char: a pattern of one character. Of an assert: `^`, `$`, `b` or `B`. Of a save: its group."""
    to: int = 0
    other: int = 0
    """Of a split: the way that is tried second."""


class Program(NamedTuple):
    code: tuple[Instruction, ...]
    slots: tuple[str, ...]
    """What is saved on the way: `("name<", "name>")` are both ends of the group `name`."""
    nullable: bool
    """It matches nothing at all, anywhere."""


class _Piece(NamedTuple):
    """Code with places relative to its own begin."""

    code: list[Instruction]
    nullable: bool


AHEAD = "(?="
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:|[^\]\\])*\]", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsSnrtfv0]|[^\w\s]|\s)")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\((?:\?(?::|P?<([A-Za-z_]\w*)>))?(?!\?)")
_ASSERTS = {"^": "^", "$": "$", r"\A": "^", r"\Z": "$", r"\z": "$", r"\b": "b", r"\B": "B"}


def compiled(pattern: str, where: str) -> Program:
    """`compiled("<think>\\\\s*", "fields.thinking.open_pattern")`; an error says `where`."""
    if len(pattern) > MAX_PATTERN:
        raise SettingsError(f"{where} has {len(pattern)} characters; {MAX_PATTERN} are the most.")
    return _Parser(pattern, where).program()


def of_literals(literals: tuple[str, ...]) -> Program:
    """Any of these texts; the longest, where several fit."""
    ordered = sorted(dict.fromkeys(literals), key=len, reverse=True)
    pieces = [_Piece([Instruction("char", re.escape(c)) for c in text], False) for text in ordered]
    piece = _either(pieces)
    return Program((*piece.code, Instruction("match")), (), False)


class _Parser:
    def __init__(self, pattern: str, where: str) -> None:
        self._rest = pattern.removeprefix("(?s)")
        self._where = where
        self._slots: list[str] = []

    def program(self) -> Program:
        piece = self._alternatives()
        if self._rest:
            self._refuse("has a ) too many")
        if len(piece.code) > MAX_PROGRAM:
            self._refuse("is too large with its repeats written out")
        return Program((*piece.code, Instruction("match")), tuple(self._slots), piece.nullable)

    def _refuse(self, why: str) -> NoReturn:
        raise SettingsError(f"{self._where}: the pattern {why}, at {self._rest[:20]!r}.")

    def _alternatives(self) -> _Piece:
        branches = [self._sequence()]
        while self._took("|"):
            branches.append(self._sequence())
        return _either(branches)

    def _sequence(self) -> _Piece:
        code: list[Instruction] = []
        nullable = True
        while self._rest and self._rest[0] not in "|)":
            piece = self._repeated(self._atom())
            code += _moved(piece.code, len(code))
            nullable = nullable and piece.nullable
        return _Piece(code, nullable)

    def _atom(self) -> _Piece:
        if self._rest[0] == "(":
            return self._group()
        for text in (self._rest[:1], self._rest[:2]):
            if text in _ASSERTS:
                self._rest = self._rest[len(text) :]
                kind = _ASSERTS[text]
                return _Piece([Instruction("assert", kind)], kind in "bB")
        return _Piece([Instruction("char", self._character())], False)

    def _character(self) -> str:
        """The pattern of one character, which `re` itself may read: it cannot go back and forth in it."""
        first = self._rest[0]
        if first in "*+?":
            self._refuse("repeats nothing")
        form = {"[": _CLASS, "\\": _ESCAPE}.get(first)
        found = form.match(self._rest) if form else None
        if form and not found:
            self._refuse("has something that is not supported")
        text = found[0] if found else first
        self._rest = self._rest[len(text) :]
        if found or text == ".":
            try:
                re.compile(text)
            except re.error:
                self._refuse("has a class that cannot be read")
            return text
        return re.escape(text)

    def _group(self) -> _Piece:
        if self._took(AHEAD):
            return self._ahead()
        found = _GROUP.match(self._rest)
        if not found:
            self._refuse("has a kind of group that is not supported")
        self._rest = self._rest[found.end() :]
        slot = self._named(found[1]) if found[1] else None
        piece = self._alternatives()
        if not self._took(")"):
            self._refuse("has a ( that is not closed")
        if slot is None:
            return piece
        begin, end = Instruction("save", str(slot)), Instruction("save", str(slot + 1))
        return _Piece([begin, *_moved(piece.code, 1), end], piece.nullable)

    def _named(self, name: str) -> int:
        if name + "<" in self._slots:
            self._refuse(f"names two groups {name}")
        self._slots += [name + "<", name + ">"]
        return len(self._slots) - 2

    def _ahead(self) -> _Piece:
        """Only at the very end, where it says how far the match goes and what must follow."""
        self._slots.append(AHEAD)
        slot = len(self._slots) - 1
        piece = self._alternatives()
        if not self._took(")") or self._rest.strip(")"):
            self._refuse("looks ahead elsewhere than at its end")
        return _Piece([Instruction("save", str(slot)), *_moved(piece.code, 1)], True)

    def _repeated(self, piece: _Piece) -> _Piece:
        least, most = self._count()
        if (least, most) == (1, 1):
            return piece
        lazy = self._took("?")
        if self._rest[:1] in ("+", "*"):
            self._refuse("has a repeat that is not supported")
        code: list[Instruction] = []
        for _ in range(least):
            code += _moved(piece.code, len(code))
        if most is None:
            code += _moved(_loop(piece.code, lazy), len(code))
        else:
            code += _moved(_optional(piece.code, most - least, lazy), len(code))
        if len(code) > MAX_PROGRAM:
            self._refuse("is too large with its repeats written out")
        return _Piece(code, piece.nullable or least == 0)

    def _count(self) -> tuple[int, int | None]:
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self._rest[:1] in simple:
            found = simple[self._rest[0]]
            self._rest = self._rest[1:]
            return found
        count = _COUNT.match(self._rest)
        if not count or not (count[1] or count[3]):
            return 1, 1
        self._rest = self._rest[count.end() :]
        least = int(count[1] or 0)
        most = (int(count[3]) if count[3] else None) if count[2] else least
        if max(least, most or 0) > MAX_REPEAT or (most is not None and most < least):
            self._refuse(f"repeats more than {MAX_REPEAT} times, or backwards")
        return least, most

    def _took(self, text: str) -> bool:
        if not self._rest.startswith(text):
            return False
        self._rest = self._rest[len(text) :]
        return True


def _moved(code: list[Instruction], by: int) -> list[Instruction]:
    return [
        one._replace(to=one.to + by, other=one.other + by) if one.op in ("split", "jump") else one
        for one in code
    ]


def _split(first: int, second: int, lazy: bool = False) -> Instruction:
    return Instruction("split", to=second if lazy else first, other=first if lazy else second)


def _either(branches: list[_Piece]) -> _Piece:
    code = branches[-1].code
    for branch in reversed(branches[:-1]):
        size = len(branch.code)
        end = Instruction("jump", to=size + 2 + len(code))
        code = [_split(1, size + 2), *_moved(branch.code, 1), end, *_moved(code, size + 2)]
    return _Piece(code, any(branch.nullable for branch in branches))


def _loop(code: list[Instruction], lazy: bool) -> list[Instruction]:
    size = len(code)
    return [_split(1, size + 2, lazy), *_moved(code, 1), Instruction("jump", to=0)]


def _optional(code: list[Instruction], times: int, lazy: bool) -> list[Instruction]:
    """`x??x?`: each time one way leads past all that follow."""
    size = len(code) + 1
    made: list[Instruction] = []
    for number in range(times):
        made += [_split(number * size + 1, times * size, lazy), *_moved(code, number * size + 1)]
    return made
