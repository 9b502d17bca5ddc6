"""A grammar under construction, as the Lark text that llguidance reads.

Facts about llguidance: it cuts a text into lexemes, always the longest that may be there, but a lazy one ends
as early as possible; it never reads text again. Therefore free text is one lexeme with the marker that ends
it. A special token is written by its id, and no text can represent it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from dragoman.constrain.compile_limits import compile_grammar
from dragoman.constrain.vocabulary import byte_vocabulary
from dragoman.errors import TOOLS, BadRequest
from dragoman.limits import Limits, check_count

_JSON = json.JSONEncoder(ensure_ascii=False)
MOST_BYTES = 4 * 1024 * 1024
"""Maximum size of the text of one grammar."""


class Symbol(str):
    """A part of the grammar; an ordinary str is text that the model writes."""

    __slots__ = ()


GrammarPart: TypeAlias = str | Symbol


def literal(text: str) -> Symbol:
    return Symbol(_JSON.encode(text))


def regex(pattern: str) -> Symbol:
    """Return a terminal of a pattern, which must be one line and have its slashes escaped."""
    return Symbol(f"/{pattern}/")


def either(options: Iterable[str]) -> Symbol:
    listed = list(dict.fromkeys(options))
    return Symbol(listed[0] if len(listed) == 1 else f"({' | '.join(listed)})")


@lru_cache(maxsize=1024)
def is_possible(expression: str) -> bool:
    """Whether a language contains any text. A language without texts would be a dead end for the model."""
    return any(ask_first(f"start: T\nT: {expression}"))


def ask_first(grammar: str) -> bytes:
    """Return the bytes that a text may begin with, as bits, and a bit for the end.
    Empty if there is no text.
    """
    native = compile_grammar(byte_vocabulary(), grammar)
    bits = b"" if native.is_error() else native.compute_bitmask()
    if native.is_error():
        # If the question takes too long, any byte is possible.
        return b"" if native.get_error().startswith("NoExtension") else b"\xff" * 32
    return bits


class LarkBuilder:
    """Builder of a grammar: `rule(...)` and `terminal(...)` return names; equal bodies share a name."""

    def __init__(self, special: Mapping[str, int] | None = None, banned: str = "") -> None:
        self._special = {text: id_ for text, id_ in (special or {}).items() if text}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._names: dict[str, str] = {}
        self._lines: list[str] = []
        self._size = 0
        self.banned = banned
        self.any = regex(f"[^{banned}]*" if banned else "(?s:.*)")
        """Terminal of any text. Banned characters are those that the parser replaces by others."""

    # Definitions

    def rule(self, body: str, *, lazy: bool = False) -> Symbol:
        return self._name("r", "[lazy]" if lazy else "", body)

    def terminal(self, body: str) -> Symbol:
        return self._name("T", "", body)

    def reserve(self) -> Symbol:
        """Reserve a name for a rule that may refer to itself; `define` adds its body later."""
        self._lines.append("")
        return Symbol(f"r{len(self._lines) - 1}")

    def define(self, name: Symbol, body: str) -> None:
        self._set(int(name[1:]), f"{name}: {body}")

    def _name(self, prefix: str, options: str, body: str) -> Symbol:
        key = f"{prefix}{options}: {body}"
        if key not in self._names:
            name = f"{prefix}{len(self._lines)}"
            self._lines.append("")
            self._set(len(self._lines) - 1, f"{name}{options}: {body}")
            self._names[key] = name
        return Symbol(self._names[key])

    def _set(self, number: int, line: str) -> None:
        self._size += len(line)
        if self._size > MOST_BYTES:
            message = f"The grammar of the tools exceeds {MOST_BYTES} bytes; declare fewer or simpler tools."
            raise BadRequest(message, param=TOOLS, code="limit_exceeded")
        self._lines[number] = line

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._lines])

    # Markers and text

    def pieces(self, text: str) -> list[str | int]:
        """Split a marker into texts and ids of special tokens."""
        items: list[str | int] = []
        at = 0
        for match in self._cut.finditer(text):
            items += [text[at : match.start()], self._special[match.group()]]
            at = match.end()
        return [piece for piece in (*items, text[at:]) if piece != ""]

    def sequence(self, *parts: GrammarPart) -> Symbol:
        """Write texts and symbols in sequence. Adjacent texts are joined, so that they are one lexeme."""
        joined: list[GrammarPart] = []
        for part in parts:
            if not isinstance(part, Symbol) and joined and not isinstance(joined[-1], Symbol):
                joined[-1] += part
            elif part:
                joined.append(part)
        written = [[part] if isinstance(part, Symbol) else self._write_text(part) for part in joined]
        return Symbol(" ".join(symbol for symbols in written for symbol in symbols))

    def _write_text(self, text: str) -> list[Symbol]:
        return [
            Symbol(f"<[{piece}]>") if isinstance(piece, int) else literal(piece)
            for piece in self.pieces(text)
        ]

    def is_text(self, marker: str) -> bool:
        """Whether text can forge the marker, because it contains no special token."""
        return all(isinstance(piece, str) for piece in self.pieces(marker))

    def without(self, markers: Iterable[str]) -> Symbol | None:
        """Return the language of texts without these markers; None if no text is excluded."""
        texts = [literal(marker) for marker in dict.fromkeys(markers) if marker and self.is_text(marker)]
        return self.without_any(texts)

    def without_any(self, terminals: Sequence[str]) -> Symbol | None:
        """Return the language of texts without these terminals; None if there are none."""
        if not terminals:
            return None
        return Symbol(f"~(/(?s:.*)/ {either(terminals)} /(?s:.*)/)")

    def text(self, *languages: str | None) -> Symbol:
        """Return a terminal for text that is in all of these languages."""
        return self.terminal(" & ".join([self.any, *(language for language in languages if language)]))

    def text_until(self, end: str, *languages: str | None, core: str | None = None) -> Symbol:
        """Return a rule for text in these languages up to the marker `end`, and the marker.

        `core` is what the text must not contain, if that is less than the whole marker.
        """
        pieces = self.pieces(end)
        lead = pieces[0] if pieces and isinstance(pieces[0], str) else ""
        if len(lead) == len(end):
            content = self.text(*languages, self.without([core or end]))
            return self.rule(f"{content} {literal(end)}", lazy=True)
        content = self.text(*languages)
        before = self.terminal(f"{content} {literal(lead)}") if lead else content
        return self.rule(self.sequence(before, end[len(lead) :]))


# Limits of a Lark grammar, checked before it is compiled.
#
# llguidance follows names by recursion, and its time grows with the square of an expression.


MOST_DEPTH = 500
# Possessive quantifiers do not backtrack, which would take time quadratic in the text.
_PIECES = re.compile(
    r"""(?: (?:\#|//)[^\n]*+ | \\. )
      | (?: "(?:\\.|[^"\\])*+" )
      | (?P<pattern> /(?:\\.|[^/\\])++/ )
      | (?P<defined> ^[ \t]*+[!?]*+[_a-zA-Z][\w-]*+ (?=[^:\n"/]*+:) )
      | (?P<name> [_a-zA-Z][\w-]*+ )""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def check_lark(grammar: str, param: str, limits: Limits) -> None:
    """Raise if an expression is too long, or names refer to each other too deeply."""
    used: dict[str, list[str]] = {}
    bodies: dict[str, int] = {}
    current = ""
    for piece in _PIECES.finditer(grammar):
        if piece["defined"]:
            current = piece["defined"].strip().lstrip("!?")
            used[current] = []
        elif piece["name"] and current:
            used[current].append(piece["name"])
        elif piece["pattern"]:
            bodies[current] = bodies.get(current, 0) + len(piece["pattern"])
    for name, length in bodies.items():
        check_count(length, limits.pattern_chars, param, f"characters of the expressions of {name[:64]!r}")
    if count_depth(used, "start") > MOST_DEPTH:
        message = (
            f"'{param}' has names that refer to each other more than {MOST_DEPTH} levels deep; flatten it."
        )
        raise BadRequest(message, param=param, code="limit_exceeded")


def count_depth(used: dict[str, list[str]], start: str) -> int:
    """Return the depth of a walk that enters each name at its first use, as llguidance does."""
    seen, path, deepest = {start}, [iter(used.get(start, ()))], 1
    while path:
        name = next((name for name in path[-1] if name not in seen), None)
        if name is None:
            path.pop()
        else:
            seen.add(name)
            path.append(iter(used.get(name, ())))
            deepest = max(deepest, len(path))
    return deepest
