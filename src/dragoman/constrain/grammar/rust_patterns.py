"""Regular expressions as Lark's terminals have them, in the syntax of Rust, as trees.

Only expressions that llguidance has compiled come here; what is refused is what it reads and this does not.
"""

import re

from dragoman.constrain.grammar.trees import (
    EMPTY,
    CharClass,
    LiteralText,
    Tree,
    alternate,
    concatenate,
    repeat,
)

DEEPEST = 100
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|(?P<flags>[a-zA-Z-]*)(?P<end>[:)])))?")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]+)\})")
_KIND = re.compile(r"\\(?:[dDwWsS]|[pP](?:\{[^}]*\}|.))")
_COUNT = re.compile(r"\{ *([0-9]+) *(?:(,) *([0-9]*) *)?\}")
_CONTROLS = {"a": "\a", "f": "\f", "t": "\t", "n": "\n", "r": "\r", "v": "\v"}
_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class UnreadPattern(ValueError):
    """What of the expression is not read."""


def pattern_tree(pattern: str, flags: str = "") -> Tree:
    """`pattern_tree("a|[b-d]+", "i")`: flags are those behind the closing slash."""
    reader = _Reader(pattern)
    reader.set_flags(flags)
    return reader.alternatives(0)


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.any_case = False
        self.dot_all = False

    def set_flags(self, flags: str) -> None:
        wanted, _, unwanted = flags.partition("-")
        for flag in wanted + unwanted:
            if flag not in "imsu" or (flag == "u" and flag in unwanted):
                raise UnreadPattern(f"has the flag {flag}")
        self.any_case = (self.any_case or "i" in wanted) and "i" not in unwanted
        self.dot_all = (self.dot_all or "s" in wanted) and "s" not in unwanted

    def alternatives(self, depth: int) -> Tree:
        """Up to the end of the group. Flags that are set within it end with it."""
        if depth > DEEPEST:
            raise UnreadPattern(f"has more than {DEEPEST} groups within each other")
        flags = self.any_case, self.dot_all
        options = [self._sequence(depth)]
        while self._took("|"):
            options.append(self._sequence(depth))
        self.any_case, self.dot_all = flags
        return alternate(options)

    def _sequence(self, depth: int) -> Tree:
        parts = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self._repeated(self._atom(depth)))
        return concatenate(parts)

    def _repeated(self, inner: Tree) -> Tree:
        while True:
            counted = _COUNT.match(self.pattern, self.at)
            times = _TIMES.get(self.pattern[self.at : self.at + 1])
            if counted:
                self.at = counted.end()
                least = int(counted[1])
                times = least, (int(counted[3]) if counted[3] else None) if counted[2] else least
            elif times:
                self.at += 1
            else:
                return inner
            # Whether it would rather be short makes no difference to what it matches from end to end.
            self._took("?")
            inner = repeat(inner, *times)

    def _atom(self, depth: int) -> Tree:
        character = self.pattern[self.at]
        match character:
            case "(":
                return self._group(depth)
            case "[":
                return CharClass(self._class(), self.any_case)
            case "\\":
                return self._escape()
            case ".":
                self.at += 1
                return CharClass(r"\s\S" if self.dot_all else r"^\n")
            case "^" | "$":
                # llguidance has them at the ends only, where they say nothing.
                self.at += 1
                return EMPTY
        self.at += 1
        return self._character(character)

    def _group(self, depth: int) -> Tree:
        opening = _GROUP.match(self.pattern, self.at)
        if opening is None:
            raise UnreadPattern("has a group of an unknown kind")
        self.at = opening.end()
        before = self.any_case, self.dot_all
        self.set_flags(opening["flags"] or "")
        if opening["end"] == ")":
            return EMPTY
        inner = self.alternatives(depth + 1)
        self._took(")")
        self.any_case, self.dot_all = before
        return inner

    def _escape(self) -> Tree:
        code, kind = _CODE.match(self.pattern, self.at), _KIND.match(self.pattern, self.at)
        if code:
            self.at = code.end()
            return self._character(chr(int(next(filter(None, code.groups())), 16)))
        if kind:
            self.at = kind.end()
            return CharClass(kind[0])
        letter = self.pattern[self.at + 1]
        self.at += 2
        if letter.isalnum() and letter not in _CONTROLS:
            raise UnreadPattern(f"has the escape \\{letter}")
        return self._character(_CONTROLS.get(letter, letter))

    def _character(self, character: str) -> Tree:
        if self.any_case and character.isalpha():
            return CharClass(character, any_case=True)
        return LiteralText(character)

    def _class(self) -> str:
        """`[^a-z[0-9]]`, with its brackets."""
        start, depth = self.at, 0
        while True:
            character = self.pattern[self.at]
            self.at += 2 if character == "\\" else 1
            if character == "[":
                depth += 1
                self._took("^")
                # A bracket that comes first stands for itself.
                self._took("]")
            elif character == "]":
                depth -= 1
                if not depth:
                    return self.pattern[start : self.at]

    def _took(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found
