"""Regular expressions as JSON Schema means them (ECMA 262), written as llguidance reads them.

    translated(r"^\\d[a&&b]$")  is  ^[0-9][a\\&\\&b]$

What the two read differently is spelled out, and what llguidance cannot do is refused by name.
"""

import re

_SPACE = r"\t\n\x0b\x0c\r \x{a0}\x{feff}\x{2028}\x{2029}\p{Zs}"
_CLASSES = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": f"[{_SPACE}]",
    "S": f"[^{_SPACE}]",
}
_WRITTEN = r"[^\x00-\x07\x0b\x0e-\x1f\x7f]"
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_CONTROLS = {"f": r"\x0c", "n": r"\n", "r": r"\r", "t": r"\t", "v": r"\x0b", "0": r"\x00"}
_QUANTIFIER = re.compile(r"\{[0-9]{1,9}(?:,[0-9]{0,9})?\}")
_GROUPS = re.compile(r"\(\?(?::|i:|P?<[A-Za-z_][A-Za-z_0-9]*>)")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(?:=[A-Za-z_]+)?\}")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
DEEPEST = 100


class PatternError(ValueError):
    """What of the expression cannot be done."""


def translated(pattern: str, *, in_json: bool = False) -> str:
    """`in_json`: the text is written as a JSON string, where some control characters cannot be written."""
    return _Scanner(pattern, in_json).whole()


class _Scanner:
    def __init__(self, pattern: str, in_json: bool) -> None:
        self.pattern = pattern
        self.in_json = in_json
        self.at = 0
        self.depth = 0

    def whole(self) -> str:
        found = []
        while self.at < len(self.pattern):
            found.append(self._next())
        if self.depth:
            raise PatternError("has a ( without its )")
        return "".join(found)

    def _next(self) -> str:
        character = self.pattern[self.at]
        match character:
            case "\\":
                return self._written(self._escape(in_class=False))
            case "[":
                return self._class()
            case "(":
                return self._group()
            case ")":
                self.depth -= 1
                if self.depth < 0:
                    raise PatternError("has a ) without its (")
            case "{":
                quantifier = _QUANTIFIER.match(self.pattern, self.at)
                self.at += len(quantifier.group()) if quantifier else 1
                return quantifier.group() if quantifier else r"\{"
            case "}" | "]":
                self.at += 1
                return "\\" + character
            case ".":
                self.at += 1
                return _ANY
        self.at += 1
        return (
            self._written(f"\\x{{{ord(character):x}}}")
            if ord(character) < 0x20 or character == "\x7f"
            else character
        )

    def _group(self) -> str:
        self.depth += 1
        if self.depth > DEEPEST:
            raise PatternError(f"has more than {DEEPEST} groups within each other")
        if self.pattern[self.at + 1 : self.at + 2] != "?":
            self.at += 1
            return "(?:"
        opening = _GROUPS.match(self.pattern, self.at)
        if opening is None:
            if self.pattern[self.at + 2 : self.at + 3] in ("=", "!", "<"):
                raise PatternError("looks around, with (?= or (?! or (?<")
            raise PatternError(f"has a group of an unknown kind, {self.pattern[self.at : self.at + 4]}")
        self.at = opening.end()
        return "(?i:" if opening.group() == "(?i:" else "(?:"

    def _escape(self, in_class: bool) -> str:
        """What stands behind a backslash."""
        self.at += 1
        if self.at == len(self.pattern):
            raise PatternError("ends with a single backslash")
        letter = self.pattern[self.at]
        for known, read in ((_HEX, self._hex), (_PROPERTY, lambda found: "\\" + found.group())):
            found = known.match(self.pattern, self.at)
            if found:
                self.at = found.end()
                return read(found)
        self.at += 1
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter == "b" and in_class:
            return r"\x08"
        if letter in "bBAZzG":
            raise PatternError(f"has \\{letter}, which looks at what stands around it")
        if letter in "123456789k":
            raise PatternError("refers back to a group")
        if letter.isalnum():
            raise PatternError(f"has an unknown escape, \\{letter}")
        return _literal(letter)

    def _hex(self, found: "re.Match[str]") -> str:
        code = int(next(part for part in found.groups() if part), 16)
        if 0xD800 <= code < 0xDC00:
            low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self.pattern, self.at)
            if low is None:
                raise PatternError("has half of a surrogate pair")
            self.at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low.group(1), 16) - 0xDC00
        if code > 0x10FFFF or 0xDC00 <= code < 0xE000:
            raise PatternError("has a code point that is no character")
        return f"\\x{{{code:x}}}"

    def _class(self) -> str:
        """`[a&&b]`: nothing but `]`, `\\`, `^` and `-` stands for anything inside."""
        self.at += 1
        negated = self.pattern[self.at : self.at + 1] == "^"
        self.at += negated
        atoms: list[str] = []
        while self.pattern[self.at : self.at + 1] != "]":
            if self.at >= len(self.pattern):
                raise PatternError("has a [ without its ]")
            atoms.append(self._atom())
        self.at += 1
        if not atoms:
            if negated:
                return "(?s:.)"
            raise PatternError("has an empty [], which nothing can match")
        whole = f"[{'^' if negated else ''}{_ranges(atoms)}]"
        return f"[{whole}&&{_WRITTEN}]" if self.in_json and not negated else whole

    def _written(self, atom: str) -> str:
        """A character that JSON cannot hold as it stands must match nothing. llguidance would skip it."""
        single = self.in_json and atom.startswith(("\\x", "\\n", "\\r", "\\t"))
        return f"[{atom}&&{_WRITTEN}]" if single else atom

    def _atom(self) -> str:
        character = self.pattern[self.at]
        if character == "\\":
            return self._escape(in_class=True)
        self.at += 1
        return "-" if character == "-" else _literal(character)


def _ranges(atoms: list[str]) -> str:
    """A hyphen is a range only between two single characters."""
    found: list[str] = []
    for at, atom in enumerate(atoms):
        between = 0 < at < len(atoms) - 1 and not any(
            side.startswith(("[", r"\p", r"\P")) for side in (atoms[at - 1], atoms[at + 1])
        )
        ended = at >= 2 and found[-2:-1] == ["-"]
        found.append(atom if atom != "-" or (between and not ended) else r"\-")
    return "".join(found)


def _literal(character: str) -> str:
    return "\\" + character if character in r"\.+*?()|[]{}^$#&-~/" else character
