"""GBNF, llama.cpp's notation for grammars, read into a tree.

read('root ::= "a" b*\\nb ::= [x-z]')
{"root": Sequence([Text("a"), Repeat(Name("b"), 0, None)]), "b": Characters([("x", "z")])}
"""

import re
from collections.abc import Iterator
from typing import TypeAlias

from msgspec import Struct

Node: TypeAlias = "Text | Characters | Name | Token | Sequence | Either | Repeat"
_DEEPEST = 100
_MOST_REPEATS = 100_000


class GbnfError(ValueError):
    """What is wrong, with the line."""


class Text(Struct, frozen=True):
    text: str


class Characters(Struct, frozen=True):
    ranges: tuple[tuple[str, str], ...]
    negated: bool = False


class Name(Struct, frozen=True):
    name: str


class Token(Struct, frozen=True):
    """A special token: `<think>` or `<[128010]>`."""

    text: str


class Sequence(Struct, frozen=True):
    parts: tuple[Node, ...]


class Either(Struct, frozen=True):
    options: tuple[Node, ...]


class Repeat(Struct, frozen=True):
    part: Node
    least: int
    most: int | None


_TOKENS = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    | (?P<is>::=)
    | (?P<name>[A-Za-z0-9_-]+)
    | (?P<text>"(?:[^"\\]|\\.)*")
    | (?P<class>\[(?:[^\]\\]|\\.)*\])
    | (?P<token><\[[0-9]+\]>|<[^<>\s]+>)
    | (?P<count>\{[ ]*[0-9]{1,9}[ ]*(?:,[ ]*[0-9]{0,9}[ ]*)?\})
    | (?P<mark>[|()*+?.])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}


def read(grammar: str) -> dict[str, Node]:
    """The rules by name. All names that occur are there, and `root` is."""
    reader = _Reader(grammar)
    rules = dict(reader.rules())
    if "root" not in rules:
        raise GbnfError("there is no rule with the name root")
    for name, line in reader.used.items():
        if name not in rules:
            raise GbnfError(f"line {line} uses the rule {name}, which is not there")
    return rules


class _Reader:
    def __init__(self, grammar: str) -> None:
        self.tokens = list(_tokens(grammar))
        self.at = 0
        self.depth = 0
        self.used: dict[str, int] = {}

    def rules(self) -> Iterator[tuple[str, Node]]:
        while self.at < len(self.tokens):
            kind, name, line = self.tokens[self.at]
            if kind != "name" or not self._begins_rule():
                raise GbnfError(f"line {line}: a rule begins with a name and ::=")
            self.at += 2
            yield name, self._either()
            if self.at < len(self.tokens) and self.tokens[self.at][0] == "mark":
                raise GbnfError(f"line {self.tokens[self.at][2]}: {self.tokens[self.at][1]} is out of place")

    def _begins_rule(self) -> bool:
        following = self.tokens[self.at + 1 : self.at + 2]
        return self.tokens[self.at][0] == "name" and bool(following) and following[0][0] == "is"

    def _either(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.tokens) and not self._begins_rule():
            kind, text, line = self.tokens[self.at]
            if kind == "mark" and text in "|)":
                break
            part = self._part(kind, text, line)
            parts.append(self._repeated(part))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _part(self, kind: str, text: str, line: int) -> Node:
        self.at += 1
        match kind, text:
            case "text", _:
                return Text("".join(_characters(text[1:-1], line)))
            case "class", _:
                return _class(text[1:-1], line)
            case "token", _:
                return Token(text)
            case "name", _:
                self.used.setdefault(text, line)
                return Name(text)
            case "mark", ".":
                return Characters((), negated=True)
            case "mark", "(":
                return self._group(line)
        raise GbnfError(f"line {line}: {text[:20]} is out of place")

    def _group(self, line: int) -> Node:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise GbnfError(f"line {line}: more than {_DEEPEST} groups within each other")
        inside = self._either()
        self.depth -= 1
        if not self._take(")"):
            raise GbnfError(f"line {line}: a ( has no )")
        return inside

    def _take(self, mark: str) -> bool:
        found = self.at < len(self.tokens) and self.tokens[self.at][:2] == ("mark", mark)
        self.at += found
        return found

    def _repeated(self, part: Node) -> Node:
        while self.at < len(self.tokens):
            kind, text, line = self.tokens[self.at]
            if kind == "count":
                least, comma, most = text.strip("{} ").partition(",")
                bounds = int(least), int(most) if most.strip() else None if comma else int(least)
                if bounds[1] is not None and not bounds[0] <= bounds[1]:
                    raise GbnfError(f"line {line}: {text} ends before it begins")
                if max(bounds[0], bounds[1] or 0) > _MOST_REPEATS:
                    raise GbnfError(f"line {line}: at most {_MOST_REPEATS} repetitions")
            elif kind == "mark" and text in "*+?":
                bounds = int(text == "+"), 1 if text == "?" else None
            else:
                break
            self.at += 1
            part = Repeat(part, *bounds)
        return part


def _tokens(grammar: str) -> Iterator[tuple[str, str, int]]:
    at = 0
    line = 1
    while at < len(grammar):
        found = _TOKENS.match(grammar, at)
        if found is None or found.lastgroup is None:
            raise GbnfError(f"line {line}: {grammar[at : at + 20].splitlines()[0]} cannot be read")
        if found.lastgroup != "space":
            yield found.lastgroup, found.group(), line
        line += found.group().count("\n")
        at = found.end()


def _characters(text: str, line: int) -> Iterator[str]:
    at = 0
    while at < len(text):
        escape = _ESCAPE.match(text, at)
        if escape is None:
            yield text[at]
            at += 1
            continue
        at = escape.end()
        code = next((part for part in escape.groups()[:3] if part), None)
        letter = _LETTERS.get(escape.group(4) or "", escape.group(4) or "")
        if code is None and letter == escape.group(4) and letter.isalnum():
            raise GbnfError(f"line {line}: \\{letter} is no escape that is known")
        yield _character(int(code, 16), line) if code else letter


def _character(code: int, line: int) -> str:
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise GbnfError(f"line {line}: a code point that is no character")
    return chr(code)


def _class(text: str, line: int) -> Characters:
    """`^a-z\\n`: what stands between the brackets."""
    negated = text.startswith("^")
    body = text[negated:]
    # A hyphen that was escaped is a character; only a bare one makes a range.
    pieces = re.findall(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", body, re.DOTALL)
    ranges, at = [], 0
    while at < len(pieces):
        first = next(_characters(pieces[at], line))
        last = first
        if pieces[at + 1 : at + 2] == ["-"] and at + 2 < len(pieces):
            last = next(_characters(pieces[at + 2], line))
            at += 2
        if last < first:
            raise GbnfError(f"line {line}: the range {first}-{last} ends before it begins")
        ranges.append((first, last))
        at += 1
    return Characters(tuple(ranges), negated)
