r"""Regular expressions as trees, and trees as expressions that llguidance reads.

Two notations are parsed, with one reader for what they share: alternatives of sequences of atoms that may be
repeated.

- ECMA 262's, which JSON Schema uses for patterns: `read_pattern(r"^\\d[a&&b]$")`. Clients send them
  unchecked, and what no automaton can do, such as lookaround, is refused by name.
- Rust's, which Lark uses for terminals: `read_terminal("a|[b-d]+", "i")`. llguidance has compiled these
  before; constructs that llguidance supports and this reader does not are refused.

`write_pattern(tree)` converts back to text that is unambiguous for llguidance: `^[0-9][a\\&\\&b]$`.
"""

import re
from abc import ABC, abstractmethod
from typing import ClassVar

from dragoman.constrain.grammar.trees import (
    EMPTY,
    Alternation,
    CharClass,
    Concatenation,
    LiteralText,
    Reference,
    Repetition,
    Tree,
    alternate,
    concatenate,
    repeat,
    walk_tree,
)

DEEPEST = 100
BEGIN, END = Reference("^", 0), Reference("$", 0)
"""Beginning and end of a text. No rule has such a name."""
ANYTHING = r"\s\S"
"""Contents of brackets that match any character."""
_OPENING = re.compile(r":|P?<[A-Za-z_]\w*>|(?P<flags>[a-zA-Z-]+)(?P<end>[:)])")
_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class PatternError(ValueError):
    """An unsupported part of an expression, as a predicate: `has a ( without its )`."""


def read_pattern(pattern: str) -> Tree:
    """Parse an ECMA 262 expression; anchors become `BEGIN` and `END`."""
    return _EcmaReader(pattern).whole()


def read_terminal(pattern: str, flags: str = "") -> Tree:
    """Parse a Rust expression; `flags` are those after its closing slash."""
    reader = _RustReader(pattern)
    reader.set_flags(flags)
    return reader.whole()


class _PatternReader(ABC):
    """Parser of alternatives of sequences of atoms that may be repeated. Subclasses define the atoms."""

    counts: ClassVar["re.Pattern[str]"]
    """Pattern of `{2,5}`: the first group is the minimum, the second the comma, the third the maximum."""
    flags: ClassVar[str]

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.any_case = self.dot_all = False

    def whole(self) -> Tree:
        item = self._alternatives(0)
        if self.at < len(self.pattern):
            raise PatternError("has a ) without its (")
        return item

    def set_flags(self, flags: str) -> None:
        """Apply flags such as `i-s`: on before the hyphen, off after it, until the end of the group."""
        wanted, _, unwanted = flags.partition("-")
        for flag in wanted + unwanted:
            if flag not in self.flags or (flag == "u" and flag in unwanted):
                raise PatternError(f"has the flag {flag}")
        self.any_case = (self.any_case or "i" in wanted) and "i" not in unwanted
        self.dot_all = (self.dot_all or "s" in wanted) and "s" not in unwanted

    def _alternatives(self, depth: int) -> Tree:
        if depth > DEEPEST:
            raise PatternError(f"has more than {DEEPEST} nested groups")
        options = [self._sequence(depth)]
        while self._took("|"):
            options.append(self._sequence(depth))
        return alternate(options)

    def _sequence(self, depth: int) -> Tree:
        parts = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            if self._count() is not None:
                raise PatternError("repeats nothing")
            parts.append(self._repeat(self._group(depth) if self._took("(") else self._atom()))
        return concatenate(parts)

    def _repeat(self, inner: Tree) -> Tree:
        for _ in range(DEEPEST):
            times = self._count()
            if times is None:
                return inner
            # Greedy and lazy repetition match the same texts from end to end.
            self._took("?")
            inner = repeat(inner, *times)
        raise PatternError(f"has more than {DEEPEST} nested repetitions")

    def _count(self) -> tuple[int, int | None] | None:
        counted = self.counts.match(self.pattern, self.at)
        if counted:
            self.at = counted.end()
            least = int(counted[1])
            return least, (int(counted[3]) if counted[3] else None) if counted[2] else least
        times = _TIMES.get(self.pattern[self.at : self.at + 1])
        self.at += times is not None
        return times

    def _group(self, depth: int) -> Tree:
        before = self.any_case, self.dot_all
        if self._took("?"):
            opening = _OPENING.match(self.pattern, self.at)
            if opening is None:
                if self.pattern[self.at : self.at + 1] in ("=", "!", "<"):
                    raise PatternError("has a lookaround, (?= or (?! or (?<")
                raise PatternError(f"has a group of an unknown kind, (?{self.pattern[self.at : self.at + 2]}")
            self.at = opening.end()
            self.set_flags(opening["flags"] or "")
            if opening["end"] == ")":
                return EMPTY
        inner = self._alternatives(depth + 1)
        if not self._took(")"):
            raise PatternError("has a ( without its )")
        self.any_case, self.dot_all = before
        return inner

    def _atom(self) -> Tree:
        character = self.pattern[self.at]
        if character == "\\":
            item = self._escape()
            return self._character(item) if isinstance(item, str) else item
        self.at += 1
        if character == "[":
            return CharClass(self._members(), self.any_case)
        if character == ".":
            return CharClass(self._dot())
        return self._anchor(character) if character in "^$" else self._character(character)

    def _character(self, character: str) -> Tree:
        if self.any_case and character.isalpha():
            return CharClass(character, any_case=True)
        return LiteralText(character)

    def _took(self, text: str) -> bool:
        outcome = self.pattern.startswith(text, self.at)
        self.at += len(text) if outcome else 0
        return outcome

    @abstractmethod
    def _escape(self) -> str | CharClass:
        """Read an escape: a character, or a class of several."""

    @abstractmethod
    def _members(self) -> str:
        """Read a class after its `[`, up to and including `]`."""

    @abstractmethod
    def _dot(self) -> str: ...

    @abstractmethod
    def _anchor(self, sign: str) -> Tree: ...


# ECMA 262

_SPACE = r"\t\n\x0b\x0c\r \x{a0}\x{feff}\x{2028}\x{2029}\p{Zs}"
_KINDS = {"d": "0-9", "D": "^0-9", "w": "0-9A-Za-z_", "W": "^0-9A-Za-z_", "s": _SPACE, "S": f"^{_SPACE}"}
_CONTROLS = {"f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}
_PROPERTY = re.compile(r"\\[pP]\{[A-Za-z_]+(?:=[A-Za-z_]+)?\}")
_HEX = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\})")
_LOW_HALF = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")


class _EcmaReader(_PatternReader):
    counts = re.compile(r"\{([0-9]{1,9})(?:(,)([0-9]{0,9}))?\}")
    flags = "i"

    def _escape(self, *, in_class: bool = False) -> str | CharClass:
        if code := _HEX.match(self.pattern, self.at):
            self.at = code.end()
            return self._code(code)
        if named := _PROPERTY.match(self.pattern, self.at):
            self.at = named.end()
            return CharClass(named[0])
        letter = self.pattern[self.at + 1 : self.at + 2]
        self.at += 2
        if letter in _KINDS:
            return CharClass(_KINDS[letter])
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter == "b" and in_class:
            return "\b"
        if not letter:
            raise PatternError("ends with a single backslash")
        if letter in "bBAZzG":
            raise PatternError(f"has \\{letter}, which depends on the text around it")
        if letter in "123456789k":
            raise PatternError("has a reference to a group")
        if letter.isalnum():
            raise PatternError(f"has an unknown escape, \\{letter}")
        return letter

    def _code(self, match: "re.Match[str]") -> str:
        code = int(next(filter(None, match.groups())), 16)
        if 0xD800 <= code < 0xDC00:
            low = _LOW_HALF.match(self.pattern, self.at)
            if low is None:
                raise PatternError("has half of a surrogate pair")
            self.at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if code > 0x10FFFF or 0xDC00 <= code < 0xE000:
            raise PatternError("has an invalid code point")
        return chr(code)

    def _members(self) -> str:
        """Read `a&&b]`: only `]`, `\\\\`, `^` and `-` have a meaning inside."""
        negated = self._took("^")
        members: list[str] = []
        while not self._took("]"):
            if self.at >= len(self.pattern):
                raise PatternError("has a [ without its ]")
            members.append(self._member())
        if not members and not negated:
            raise PatternError("has an empty [], which nothing can match")
        return "^" * negated + _write_members(members) if members else ANYTHING

    def _member(self) -> str:
        character = self.pattern[self.at]
        if character == "\\":
            item = self._escape(in_class=True)
            return escape_character(item) if isinstance(item, str) else f"[{item.inner}]"
        self.at += 1
        return character if character == "-" else escape_character(character)

    def _dot(self) -> str:
        return r"^\n\r\x{2028}\x{2029}"

    def _anchor(self, sign: str) -> Tree:
        return BEGIN if sign == "^" else END


def _write_members(members: list[str]) -> str:
    """Join the contents of brackets. A bare hyphen is a range only between two single characters."""
    texts: list[str] = []
    for at, member in enumerate(members):
        sides = members[at - 1], members[at + 1] if 0 < at < len(members) - 1 else "["
        in_range = not any(side.startswith("[") for side in sides) and texts[-2:-1] != ["-"]
        texts.append(member if member != "-" or in_range else r"\-")
    return "".join(texts)


# Rust

_RUST_CODE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]+)\})"
)
_RUST_KIND = re.compile(r"\\(?:[dDwWsS]|[pP](?:\{[^}]*\}|.))")
_RUST_CONTROLS = {"a": "\a", "f": "\f", "t": "\t", "n": "\n", "r": "\r", "v": "\v"}


class _RustReader(_PatternReader):
    counts = re.compile(r"\{ *([0-9]+) *(?:(,) *([0-9]*) *)?\}")
    flags = "imsu"

    def _escape(self) -> str | CharClass:
        if code := _RUST_CODE.match(self.pattern, self.at):
            self.at = code.end()
            return chr(int(next(filter(None, code.groups())), 16))
        if kind := _RUST_KIND.match(self.pattern, self.at):
            self.at = kind.end()
            return CharClass(kind[0])
        letter = self.pattern[self.at + 1]
        self.at += 2
        if letter.isalnum() and letter not in _RUST_CONTROLS:
            raise PatternError(f"has the escape \\{letter}")
        return _RUST_CONTROLS.get(letter, letter)

    def _members(self) -> str:
        """Read `^a-z[0-9]]`, with nested brackets."""
        start, depth = self.at - 1, 0
        self.at = start
        while True:
            character = self.pattern[self.at]
            self.at += 2 if character == "\\" else 1
            if character == "[":
                depth += 1
                self._took("^")
                # A bracket that comes first is an ordinary character.
                self._took("]")
            elif character == "]":
                depth -= 1
                if not depth:
                    return self.pattern[start : self.at]

    def _dot(self) -> str:
        return ANYTHING if self.dot_all else r"^\n"

    def _anchor(self, sign: str) -> Tree:
        # llguidance allows anchors only at the ends, where they have no effect.
        return EMPTY


# Trees as expressions that llguidance reads

_WRITTEN = r"[^\x00-\x07\x0b\x0e-\x1f\x7f]"
"""Characters that a JSON string can contain, including those with short escapes."""
_SIGNS = frozenset(r"\.+*?()|[]{}^$#&-~/")


def escape_character(character: str) -> str:
    """Escape a character so that it stands for itself, inside brackets and outside."""
    if character in _SIGNS:
        return "\\" + character
    return character if character.isprintable() else f"\\x{{{ord(character):x}}}"


def write_pattern(tree: Tree, *, in_json: bool = False) -> str:
    """Write a tree as an expression. With `in_json`, the text is a JSON string, in which some control
    characters cannot be written.

    These must match nothing; llguidance would skip them.
    """
    match tree:
        case LiteralText():
            return "".join(_write_character(one, in_json) for one in tree.text)
        case CharClass():
            only_some = in_json and not tree.inner.startswith("^")
            members = f"[[{tree.inner}]&&{_WRITTEN}]" if only_some else f"[{tree.inner}]"
            return f"(?i:{members})" if tree.any_case else members
        case Reference():
            return tree.name
        case Concatenation():
            return "".join(_write_part(part, in_json) for part in tree.parts)
        case Alternation():
            return "|".join(write_pattern(option, in_json=in_json) for option in tree.options)
        case Repetition():
            most = "" if tree.most is None else tree.most
            return f"(?:{write_pattern(tree.inner, in_json=in_json)}){{{tree.least},{most}}}"
    raise PatternError("has a part that no expression can represent")


def _write_part(part: Tree, in_json: bool) -> str:
    written = write_pattern(part, in_json=in_json)
    return f"(?:{written})" if isinstance(part, Alternation) else written


def _write_character(character: str, in_json: bool) -> str:
    written = escape_character(character)
    return f"[{written}&&{_WRITTEN}]" if in_json and not re.fullmatch(_WRITTEN, character) else written


def write_search(tree: Tree) -> str:
    """Write an expression that matches somewhere as one that matches from end to end."""
    options = tree.options if isinstance(tree, Alternation) else (tree,)
    return "|".join(map(_write_searched, options))


def _write_searched(option: Tree) -> str:
    parts = option.parts if isinstance(option, Concatenation) else (option,)
    begins, ends = parts[:1] == (BEGIN,), parts[-1:] == (END,)
    inner = concatenate(parts[begins : len(parts) - ends])
    if any(node is BEGIN or node is END for node in walk_tree(inner)):
        raise PatternError("has ^ or $ inside an alternative")
    anything = "(?s:.*)"
    return ("" if begins else anything) + f"(?:{write_pattern(inner)})" + ("" if ends else anything)
