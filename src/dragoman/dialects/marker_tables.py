"""A dialect prepared for parsing: which markers to look for in each state, and what each means.

A marker that is a special token of the model is matched by id: the token arrives as one private character, a
lone surrogate, which decoded text never contains. The same spelling in ordinary text is then text.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from dragoman.dialects.declarations import Calls, Dialect, JsonCalls, PythonCalls, Spellings
from dragoman.dialects.scan import MarkerSet

Action: TypeAlias = Literal["open", "close", "section", "end", "call", "drop", "span", "back"]

D = TypeVar("D")
FIRST_SENTINEL = 0xD800
MOST_SENTINELS = 0x800
FENCE = ("```json\n", "\n```")
SENTINEL = re.compile("[\ud800-\udfff]")
SPELLED = "A-Za-z0-9_▁:/.|｜\\-"
SPECIAL = re.compile(f"<[|｜][{SPELLED}]*>|<[{SPELLED}]+[|｜]>|</?｜DSML｜|[\ud800-\udfff]")
"""Anything that is, or looks like, a special token. Such a token arrives whole, never in halves."""


class MarkerRule(Struct, frozen=True):
    """The action at a marker."""

    action: Action
    trail: str = ""
    """Layout (whitespace) after the marker."""
    core: str = ""
    shapes: tuple[Calls, ...] = ()
    """Call syntaxes that may follow."""
    until: str = ""
    """End of a span that is dropped."""
    bare: bool = False
    """Whether the call has no marker: the match is the call's own first character."""

    @property
    def openings(self) -> MarkerSet:
        """All markers that lead into a call here."""
        return marks_of(*(_openings(shape) for shape in self.shapes))


class MarkerTable:
    """Markers of one state, with their actions."""

    def __init__(self, meanings: dict[str, MarkerRule]) -> None:
        self.meanings = meanings
        self.marks = MarkerSet(meanings)


class CompiledDialect:
    """A dialect with the marker tables of the two states of an answer: `text` and `reasoning`."""

    def __init__(
        self,
        dialect: Dialect,
        sentinels: dict[str, str],
        *,
        calls: bool,
        reasoning: bool,
        json_answer: bool = False,
    ) -> None:
        self.dialect = dialect
        self.sentinels = sentinels
        self.calls, self.reasons = calls, reasoning
        self.lone = None if json_answer or not calls else _find_lone(dialect.calls)
        """Syntax for calls without a marker that are the whole answer, or None."""
        self.unseen = str.maketrans(dict.fromkeys(sentinels.values()))
        self.replaced = str.maketrans(dict(dialect.replaced))
        self.text = MarkerTable(_text_state(dialect, calls))
        self.reasoning = MarkerTable(_reasoning_state(dialect, calls))
        markers = sorted({mark.strip() for mark in _markers(dialect) if SPECIAL.search(mark)}, key=len)
        self.halves = frozenset(
            half for mark in markers for half in _beginnings(mark) if SPECIAL.search(half)
        )
        """Truncated markers that contain a special token; such a rest at the end of an answer is not text."""
        self.structure = re.compile("|".join([*map(re.escape, reversed(markers)), SPECIAL.pattern]))
        """Markers that contain special tokens."""


@lru_cache(maxsize=256)
def compile_dialect(
    dialect: Dialect,
    special: frozenset[str] = frozenset(),
    *,
    calls: bool = True,
    reasoning: bool = True,
    json_answer: bool = False,
) -> CompiledDialect:
    """Compile a dialect; the result is cached, shared between answers and never changed.

    With `json_answer`, a ```json fence around the answer is removed.
    """
    chosen = msgspec.structs.replace(dialect, response_template=None)
    if not reasoning and not dialect.channels:
        chosen = msgspec.structs.replace(chosen, reasoning=None)
    if json_answer and dialect.unfenced:
        chosen = msgspec.structs.replace(chosen, drops=(*chosen.drops, *FENCE))
    spelled = str(msgspec.to_builtins(msgspec.structs.replace(chosen, prepends="")))
    used = sorted(token for token in special if token and token in spelled)[:MOST_SENTINELS]
    sentinels = {token: chr(FIRST_SENTINEL + number) for number, token in enumerate(used)}
    by_id = msgspec.structs.replace(_by_id(chosen, sentinels), prepends=dialect.prepends)
    return CompiledDialect(by_id, sentinels, calls=calls, reasoning=reasoning, json_answer=json_answer)


def _by_id(value: D, sentinels: dict[str, str]) -> D:
    """Replace special tokens in the markers of a declaration with their private characters."""
    if not sentinels:
        return value
    by_length = sorted(sentinels.items(), key=lambda item: -len(item[0]))

    def replaced(part: Any) -> Any:
        if isinstance(part, str):
            for token, sentinel in by_length:
                part = part.replace(token, sentinel)
            return part
        if isinstance(part, tuple | frozenset):
            return type(part)(replaced(item) for item in part)
        if isinstance(part, Struct):
            return type(part)(**{name: replaced(getattr(part, name)) for name in part.__struct_fields__})
        return part

    done: D = replaced(value)
    return done


def _find_lone(shapes: tuple[Calls, ...]) -> JsonCalls | None:
    for shape in shapes:
        if isinstance(shape, JsonCalls) and shape.alone:
            return msgspec.structs.replace(
                shape, open=(), close=(), whole=True, several=True, needs_arguments=True, declared=True
            )
    return None


def _markers(value: Any) -> Iterator[str]:
    """Yield all strings of a declaration except output templates and names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _markers(item)
    elif isinstance(value, Struct):
        for name in value.__struct_fields__:
            if name not in ("written", "models", "stems", "aliases"):
                yield from _markers(getattr(value, name))


def _beginnings(mark: str) -> Iterator[str]:
    return (mark[:size] for size in range(1, len(mark)))


def variants(spellings: Iterable[str], before: str = "") -> dict[str, tuple[str, str]]:
    """Map each spelling with which a marker may be matched to the marker without layout and the layout after
    it.
    """
    fields: dict[str, tuple[str, str]] = {}
    for spelling in spellings:
        core = spelling.strip() or spelling
        lead = before + spelling[: len(spelling) - len(spelling.lstrip())] if spelling.strip() else ""
        trail = spelling[len(spelling.rstrip()) :] if spelling.strip() else ""
        for size in range(len(lead) + 1):
            fields.setdefault(lead[len(lead) - size :] + core, (core, trail))
    return fields


@lru_cache(maxsize=4096)
def marks_of(*spellings: Spellings) -> MarkerSet:
    """Return a marker set for a reader, without the layout around the markers."""
    return MarkerSet(spelling.strip() or spelling for group in spellings for spelling in group if spelling)


def first_characters(shape: Calls) -> Spellings:
    """Return the characters that a call without a marker begins with."""
    if isinstance(shape, JsonCalls):
        return ("{",) if shape.list == "never" else ("[", "{") if shape.list == "may" else ("[",)
    return ("[",) if isinstance(shape, PythonCalls) else ()


def _text_state(dialect: Dialect, calls: bool) -> dict[str, MarkerRule]:
    meanings: dict[str, MarkerRule] = {}
    _add_drops(meanings, dialect)
    thinking = dialect.reasoning
    if thinking is not None:
        if thinking.stray_close == "drop":
            _add(meanings, thinking.close, "drop")
        _add(meanings, thinking.open, "open")
    if calls:
        _add_calls(meanings, dialect.calls)
    return meanings


def _reasoning_state(dialect: Dialect, calls: bool) -> dict[str, MarkerRule]:
    meanings: dict[str, MarkerRule] = {}
    thinking = dialect.reasoning
    if thinking is None:
        return meanings
    _add_drops(meanings, dialect)
    ended_by = thinking.ended_by
    openings = tuple(mark for shape in dialect.calls for mark in _openings(shape))
    if thinking.ended_by_call and not calls and SENTINEL.search("".join(openings)):
        # Calls are not requested, so the dialect's tables lack their special tokens; these still end
        # reasoning.
        ended_by += openings
    elif thinking.ended_by_call:
        _add_calls(meanings, dialect.calls)
    _add(meanings, thinking.open, "drop")
    for mark, (core, _) in variants(ended_by).items():
        known = meanings.get(mark)
        if known is None or known.action == "drop":
            meanings[mark] = MarkerRule("back", core=core)
    _add(meanings, thinking.close, "close")
    return meanings


def _openings(shape: Calls) -> Spellings:
    return shape.open + (shape.section.open if shape.section else ())


def _add(meanings: dict[str, MarkerRule], spellings: Spellings, action: Action) -> None:
    for mark, (core, trail) in variants(spellings).items():
        meanings[mark] = MarkerRule(action, trail, core)


def _add_drops(meanings: dict[str, MarkerRule], dialect: Dialect) -> None:
    _add(meanings, dialect.drops, "drop")
    for start, end in dialect.drop_spans:
        meanings[start] = MarkerRule("span", until=end, core=start)


def _add_calls(meanings: dict[str, MarkerRule], shapes: tuple[Calls, ...]) -> None:
    """Add the markers of calls. A marker shared by several syntaxes leads to all; the
    text after it decides.
    """
    for shape in shapes:
        section = shape.section
        closes = (*shape.close, *(section.close if section else ()))
        for mark, (core, trail) in variants(closes).items():
            meanings.setdefault(mark, MarkerRule("end", trail, core))
    for shape in shapes:
        section = shape.section
        if section is not None:
            for mark, (core, trail) in variants(section.open, shape.before).items():
                _join(meanings, mark, MarkerRule("section", trail, core, (shape,)))
        # A call that begins with its own first character is recognised only outside of sections.
        if shape.open or section is None:
            opens = shape.open or first_characters(shape)
            for mark, (core, trail) in variants(opens, shape.before).items():
                _join(meanings, mark, MarkerRule("call", trail, core, (shape,), bare=not shape.open))


def _join(meanings: dict[str, MarkerRule], mark: str, meaning: MarkerRule) -> None:
    before = meanings.get(mark)
    if before is not None and before.action == meaning.action:
        meaning = msgspec.structs.replace(meaning, shapes=before.shapes + meaning.shapes, bare=before.bare)
    meanings[mark] = meaning
