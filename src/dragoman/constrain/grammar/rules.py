"""A grammar under construction, as the Lark text that llguidance reads.

What this file knows of llguidance: a text is cut into lexemes, always the longest that may stand there; but
a lazy one ends where it first can; and what was read is not read again. So free text is one lexeme with
the marker that ends it. A special token is written by its id, and no text can stand for it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

from dragoman.constrain.budget import compile_grammar
from dragoman.constrain.vocabulary import byte_vocabulary
from dragoman.errors import TOOLS, BadRequest
from dragoman.limits import Limits, check_count

_JSON = json.JSONEncoder(ensure_ascii=False)
MOST_BYTES = 4 * 1024 * 1024
"""Of the text of one grammar."""


class Symbol(str):
    """Part of the grammar itself; an ordinary str beside it is text that the model writes."""

    __slots__ = ()


GrammarPart: TypeAlias = str | Symbol


def literal(text: str) -> Symbol:
    return Symbol(_JSON.encode(text))


def regex(pattern: str) -> Symbol:
    """The pattern must be one line and have its slashes escaped."""
    return Symbol(f"/{pattern}/")


def either(options: Iterable[str]) -> Symbol:
    listed = list(dict.fromkeys(options))
    return Symbol(listed[0] if len(listed) == 1 else f"({' | '.join(listed)})")


@lru_cache(maxsize=1024)
def is_possible(expression: str) -> bool:
    """Whether there is a text in a language. One without any would be a dead end for whoever enters it."""
    return any(ask_first(f"start: T\nT: {expression}"))


def ask_first(grammar: str) -> bytes:
    """What a text may begin with: a bit for each byte, and one for the end. Empty where there is no text."""
    native = compile_grammar(byte_vocabulary(), grammar)
    bits = b"" if native.is_error() else native.compute_bitmask()
    if native.is_error():
        # What takes too long to find out may be anything.
        return b"" if native.get_error().startswith("NoExtension") else b"\xff" * 32
    return bits


class Rules:
    """`rules.rule(...)` and `rules.terminal(...)` give names; what is the same has one name."""

    def __init__(self, special: Mapping[str, int] | None = None, banned: str = "") -> None:
        self._special = {text: id_ for text, id_ in (special or {}).items() if text}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._names: dict[str, str] = {}
        self._lines: list[str] = []
        self._size = 0
        self.banned = banned
        self.any = regex(f"[^{banned}]*" if banned else "(?s:.*)")
        """Any text. The banned characters are those that a reader takes for others."""

    # What is defined

    def rule(self, body: str, *, lazy: bool = False) -> Symbol:
        return self._name("r", "[lazy]" if lazy else "", body)

    def terminal(self, body: str) -> Symbol:
        return self._name("T", "", body)

    def reserve(self) -> Symbol:
        """A name for a rule that may speak of itself; `define` says later what it is."""
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
            message = "The tools of this request make a grammar that is too large."
            raise BadRequest(message, param=TOOLS, code="limit_exceeded")
        self._lines[number] = line

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._lines])

    # Markers and text

    def pieces(self, text: str) -> list[str | int]:
        """A marker as text and the ids of special tokens."""
        found: list[str | int] = []
        at = 0
        for match in self._cut.finditer(text):
            found += [text[at : match.start()], self._special[match.group()]]
            at = match.end()
        return [piece for piece in (*found, text[at:]) if piece != ""]

    def sequence(self, *parts: GrammarPart) -> Symbol:
        """Texts and symbols after each other. Texts that meet are one, so that they are one lexeme."""
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
        """Whether text can forge the marker: no special token is in it."""
        return all(isinstance(piece, str) for piece in self.pieces(marker))

    def without(self, markers: Iterable[str]) -> Symbol | None:
        """The language of texts that have none of these in them; None if nothing forbids any text."""
        texts = [literal(marker) for marker in dict.fromkeys(markers) if marker and self.is_text(marker)]
        return self.without_any(texts)

    def without_any(self, terminals: Sequence[str]) -> Symbol | None:
        """The same with terminals for markers."""
        if not terminals:
            return None
        return Symbol(f"~(/(?s:.*)/ {either(terminals)} /(?s:.*)/)")

    def text(self, *languages: str | None) -> Symbol:
        """A terminal: text that is in all of these languages."""
        return self.terminal(" & ".join([self.any, *(language for language in languages if language)]))

    def text_until(self, end: str, *languages: str | None, core: str | None = None) -> Symbol:
        """Text in these languages up to the marker `end`, and the marker.

        `core` is what the text must not have in it, if that is less than the whole marker.
        """
        pieces = self.pieces(end)
        lead = pieces[0] if pieces and isinstance(pieces[0], str) else ""
        if len(lead) == len(end):
            content = self.text(*languages, self.without([core or end]))
            return self.rule(f"{content} {literal(end)}", lazy=True)
        content = self.text(*languages)
        before = self.terminal(f"{content} {literal(lead)}") if lead else content
        return self.rule(self.sequence(before, end[len(lead) :]))


# What a grammar in Lark may cost, asked before it is compiled.
#
# llguidance follows names by recursion, and takes time that grows with the square of an expression.


MOST_DEPTH = 500
# Nothing is tried in a second way, which would take time that grows with the square of the text.
_PIECES = re.compile(
    r"""(?: (?:\#|//)[^\n]*+ | \\. )
      | (?: "(?:\\.|[^"\\])*+" )
      | (?P<pattern> /(?:\\.|[^/\\])++/ )
      | (?P<defined> ^[ \t]*+[!?]*+[_a-zA-Z][\w-]*+ (?=[^:\n"/]*+:) )
      | (?P<name> [_a-zA-Z][\w-]*+ )""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def check_lark(grammar: str, param: str, limits: Limits) -> None:
    """Raises where an expression is too long, or names lead to names too often."""
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
        message = f"'{param}' has names that lead to further names more than {MOST_DEPTH} times."
        raise BadRequest(message, param=param, code="limit_exceeded")


def count_depth(used: dict[str, list[str]], start: str) -> int:
    """How deep one gets who goes into each name at its first use, as llguidance does."""
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
