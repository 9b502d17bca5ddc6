"""Derives a template's call syntax from renderings that differ in one input each.

First the text around calls (`frame_calls`): `<s><c>A</c></s>` and `<s><c>A</c><c>B</c></s>` together show
that `<c>` is around each call and `<s>` around all. Then the known syntaxes are tried in turn.
"""

import json
import re
from itertools import islice
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from dragoman.dialects.declarations import (
    BraceCalls,
    Calls,
    CallSection,
    JsonCalls,
    KeyedCalls,
    NamedCalls,
    PythonCalls,
    TaggedCalls,
)
from dragoman.prompt.probe import (
    IDS,
    KEYS,
    NAMES,
    NUMBER,
    VALUES,
    common_prefix,
    segments,
    shared_end,
    without_end,
)

_DECODER = json.JSONDecoder()
_SENTINEL = re.compile("probe(Fn|Key|Val|Text|Mind|id)")


Span: TypeAlias = tuple[int, int]


class AnswerBodies(Struct, frozen=True):
    """Answers without the beginning and end of the turn; None where the template cannot write one."""

    one: str
    two: str | None
    """Answer with two calls."""
    pair: str | None
    """Answer with one call with two arguments."""
    number: str | None
    """Answer with one call whose argument is a number."""


class CallFrame(Struct, frozen=True):
    """Text around calls: around each, around all together, and between two."""

    open: str
    close: str
    between: str = ""
    section_open: str = ""
    section_close: str = ""
    several: bool = False
    """Whether several calls follow one marker, separated by `between`."""

    def markers(self) -> dict[str, Any]:
        """Return the frame as fields of a declaration."""
        opens, section, before = _spelling(self.open), None, ""
        if self.section_open.strip() and self.section_close.strip():
            section = CallSection(open=(self.section_open,), close=(self.section_close,))
        elif self.section_open.strip():
            # A section without an end is not a section: its marker may precede a call.
            opens = (self.section_open + self.open, self.open)
        else:
            before = self.section_open
        return {
            "open": opens,
            "close": _spelling(self.close),
            "between": self.between,
            "before": before,
            "section": section,
        }


def frame_calls(bodies: AnswerBodies, one: Span, two: tuple[Span, Span] | None) -> CallFrame:
    """Derive the frame from the span of a call in an answer with one call, and of both in an answer with two.

    `<s><c>A</c></s>` and `<s><c>A</c><c>B</c></s>` show that `<c>` is around each call and `<s>` around all.
    """
    lead, tail = bodies.one[: one[0]], bodies.one[one[1] :]
    if two is None or bodies.two is None:
        return CallFrame(lead, tail)
    middle = bodies.two[two[0][1] : two[1][0]]
    opened = shared_end(lead, middle)
    if not opened.strip():
        return CallFrame(lead, tail, middle, several=True)
    opened = lead if opened.strip() == lead.strip() else opened
    rest = without_end(middle, opened) if middle.endswith(opened) else middle.removesuffix(opened.strip())
    closed = common_prefix(rest, tail)
    return CallFrame(opened, closed, rest[len(closed) :], without_end(lead, opened), tail[len(closed) :])


def _spelling(text: str) -> tuple[str, ...]:
    return (text,) if text.strip() else ()


class _Value(Struct, frozen=True):
    """A JSON value in a text."""

    value: Any
    span: Span


def derive_calls(bodies: AnswerBodies) -> Calls | None:
    """Return the first syntax that explains the renderings."""
    for attempt in (_json_calls, _named_calls, _python_calls, _brace_calls, _tagged_calls):
        calls = attempt(bodies)
        if calls is not None:
            return None if _SENTINEL.search(str(calls)) else calls
    return None


def _values(body: str, first: str) -> list[_Value]:
    """Return the outermost JSON values in a text that begin with this bracket."""
    values: list[_Value] = []
    offset = body.find(first)
    while offset >= 0:
        try:
            value, end = _DECODER.raw_decode(body, offset)
        except (ValueError, RecursionError):
            end = offset + 1
        else:
            values.append(_Value(value, (offset, end)))
        offset = body.find(first, end)
    return values


def _json_calls(bodies: AnswerBodies) -> JsonCalls | None:
    """Derive `{"name": ..., "arguments": ...}`, separately or in a list."""
    one = _calls_in(bodies.one, "{", 1)
    fields = _fields(one[0].value) if one else None
    if fields is None:
        return None
    lists = _calls_in(bodies.one, "[", 1)
    if not lists:
        two = _calls_in(bodies.two or "", "{", 2)
        framed = frame_calls(bodies, one[0].span, (two[0].span, two[1].span) if len(two) == 2 else None)
        return _in_frame(framed, fields, list="never")
    both = _calls_in(bodies.two or "", "[", 2)
    separate = (both[0].span, both[1].span) if len(both) == 2 else None
    return _in_frame(
        frame_calls(bodies, lists[0].span, separate), fields, list="must", indent=_indent(bodies.one)
    )


def _calls_in(body: str, first: str, most: int) -> list[_Value]:
    """Return values that contain one of the names, found as text: a value may be nested too deeply to
    serialize.
    """
    values = (
        value for value in _values(body, first) if any(name in body[slice(*value.span)] for name in NAMES)
    )
    return list(islice(values, most))


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the keys of a call's parts, found by the probe values; {} if the name is the key."""
    if not isinstance(value, dict):
        return None
    arguments = {KEYS[0]: VALUES[0]}
    if value == {NAMES[0]: arguments}:
        return {}
    keys = {
        part: next((key for key, each in value.items() if each == wanted), None)
        for part, wanted in (("name", NAMES[0]), ("arguments", arguments), ("id", IDS[0]))
    }
    if keys["name"] is None or keys["arguments"] is None:
        return None
    fields = {part: (key,) for part, key in keys.items() if key is not None}
    # Models confuse these two keys, whatever their template says.
    fields["arguments"] += tuple(sorted({"arguments", "parameters"} - {keys["arguments"]}))
    return fields


def _in_frame(framed: CallFrame, fields: dict[str, Any], **more: Any) -> JsonCalls:
    if not framed.open.strip():
        # Calls have no marker, so text that looks like one must stay text until it is a complete call.
        more |= {"whole": True, "needs_arguments": True}
    if framed.several:
        more |= {"several": True, "separator": framed.between, "between": ""}
    kind = JsonCalls if fields else KeyedCalls
    return kind(**(framed.markers() | fields | more))


def _indent(body: str) -> str:
    """Return the indent in `[\\n    {`."""
    lead = re.search(r"\[\n([ \t]*)\{", body)
    return lead[1] if lead else ""


def _named_calls(bodies: AnswerBodies) -> NamedCalls | None:
    """Derive calls with the name first and then arguments as JSON."""
    one = _named_span(bodies.one, 0, 0)
    if one is None:
        return None
    first = _named_span(bodies.two or "", 0, 0)
    second = _named_span(bodies.two or "", 1, first[1]) if first else None
    framed = frame_calls(bodies, one, (first, second) if first and second else None)
    if framed.several or not framed.open.strip():
        return None
    name_end = one[0] + len(NAMES[0])
    then = bodies.one[name_end : bodies.one.find("{", name_end)]
    markers = framed.markers()
    numbered = re.fullmatch(r":\d+(.*)", then, re.DOTALL)
    if numbered and framed.open.endswith("functions."):
        markers |= {
            "open": (framed.open.removesuffix("functions."),),
            "prefixed": "functions.",
            "ids": "kimi",
        }
        return NamedCalls(then=(numbered[1],), **markers)
    if IDS[0] in framed.open:
        before, _, after = framed.open.partition(IDS[0])
        return NamedCalls(then=(then,), id_first=after, **(markers | {"open": (before,)}))
    if IDS[0] in then:
        before, _, after = then.partition(IDS[0])
        return NamedCalls(then=(after,), id_after=before, **markers)
    return NamedCalls(then=(then,), **markers)


def _named_span(body: str, number: int, start: int) -> Span | None:
    name = body.find(NAMES[number], start)
    if name < 0:
        return None
    wanted = {KEYS[0]: VALUES[number]}
    ends = [value.span[1] for value in _values(body, "{") if value.value == wanted and value.span[0] > name]
    return (name, ends[0]) if ends else None


def _python_calls(bodies: AnswerBodies) -> PythonCalls | None:
    """Derive `f(a="x")`, with or without brackets around all calls."""
    written = re.compile(rf"{NAMES[0]}\(\s*{KEYS[0]}\s*=\s*(['\"]){VALUES[0]}\1\s*\)")
    one = written.search(bodies.one)
    if one is None:
        return None
    lead, tail = bodies.one[: one.start()], bodies.one[one.end() :]
    brackets = lead.rstrip().endswith("[") and tail.lstrip().startswith("]")
    if brackets:
        lead, tail = lead.rstrip()[:-1], tail.lstrip()[1:]
    elif not lead.strip():
        return None
    two = re.search(rf"\)(\s*[,;]?\s*){NAMES[1]}\(", bodies.two or "")
    separator = two[1] if two else ", "
    return PythonCalls(
        open=(lead,) if lead.strip() else (),
        close=(tail,) if tail.strip() else (),
        brackets=brackets,
        separator=separator,
    )


def _brace_calls(bodies: AnswerBodies) -> BraceCalls | None:
    """Derive `f{a:<|"|>x<|"|>}`: the text on both sides of a word is the quotation mark."""
    written = re.compile(rf"{NAMES[0]}\{{{KEYS[0]}:(.+?){VALUES[0]}\1\}}", re.DOTALL)
    one = written.search(bodies.one)
    if one is None:
        return None
    two = [
        re.search(rf"{name}\{{{KEYS[0]}:.+?{value}.+?\}}", bodies.two or "")
        for name, value in zip(NAMES, VALUES, strict=True)
    ]
    both = (two[0].span(), two[1].span()) if two[0] and two[1] else None
    framed = frame_calls(bodies, one.span(), both)
    if framed.several or not framed.open.strip():
        return None
    return BraceCalls(quote=one[1], **framed.markers())


# Arguments between tags

_Types: TypeAlias = Literal["string", "name"]


class _Tags(Struct, frozen=True):
    then: str
    key: str
    key_end: str
    value_end: str


class _Places(Struct, frozen=True):
    """Offsets of a call's name, its first key and the key's value."""

    name: int
    key: int
    value: int


def _tagged_calls(bodies: AnswerBodies) -> TaggedCalls | None:
    """Derive `<f><k>a</k><v>x</v></f>`, in any tags."""
    one = _places(bodies.one, 0, 0)
    tags = _tags(bodies, one) if one else None
    if one is None or tags is None:
        return None
    first = _places(bodies.two or "", 0, 0)
    second = _places(bodies.two or "", 1, first.value) if first else None
    both = (_span(first, tags), _span(second, tags)) if first and second else None
    framed = frame_calls(bodies, _span(one, tags), both)
    if framed.several or not framed.open.strip():
        return None
    key_end, value = _key_end(tags.key_end)
    stated = _stated_type(bodies, one, tags)
    if stated is not None:
        before, after, kind = stated
        return TaggedCalls(
            then=(tags.then,), key=(tags.key,), key_end=(before,), type_end=(after,), types=kind,
            value_end=(tags.value_end,), **framed.markers(),
        )  # fmt: skip
    return TaggedCalls(
        then=(tags.then,), key=(tags.key,), key_end=(key_end,), value=value, value_end=(tags.value_end,),
        **framed.markers(),
    )  # fmt: skip


def _places(body: str, number: int, start: int) -> _Places | None:
    name = body.find(NAMES[number], start)
    key = body.find(KEYS[0], name) if name >= 0 else -1
    value = body.find(VALUES[number], key) if key >= 0 else -1
    return _Places(name, key, value) if value >= 0 else None


def _span(places: _Places, tags: _Tags) -> Span:
    return places.name, places.value + len(VALUES[0]) + len(tags.value_end)


def _tags(bodies: AnswerBodies, one: _Places) -> _Tags | None:
    """Derive the tags from two arguments, which show where a value ends and the next key begins."""
    before_key = bodies.one[one.name + len(NAMES[0]) : one.key]
    key_end = bodies.one[one.key + len(KEYS[0]) : one.value]
    after = bodies.one[one.value + len(VALUES[0]) :]
    pair = bodies.pair or ""
    first, second = pair.find(VALUES[0]), pair.find(KEYS[1])
    if not 0 <= first < second:
        return None
    middle = pair[first + len(VALUES[0]) : second]
    # Layout between two tags belongs to the first, so that it is also there when no second follows.
    key = shared_end(before_key, middle).lstrip()
    if not key or not key_end.strip():
        return None
    value_end = common_prefix(without_end(middle, key), after)
    return _Tags(without_end(before_key, key), key, key_end, value_end) if value_end.strip() else None


def _key_end(text: str) -> tuple[str, str]:
    """Split `</k>\\n<v>` into two tags, with layout between them that may be missing."""
    parts = segments(text)
    gaps = [number for number, part in enumerate(parts) if part.isspace() and number]
    tag = next((number for number in reversed(range(len(parts))) if parts[number].startswith("<")), None)
    if tag and tag - 1 in gaps and parts[0].startswith("</"):
        return "".join(parts[:tag]), "".join(parts[tag:])
    return text, ""


def _stated_type(bodies: AnswerBodies, one: _Places, tags: _Tags) -> tuple[str, str, _Types] | None:
    """Derive the type in tags: `string="true"` for a word and `string="false"` for a number."""
    after = bodies.one[one.value + len(VALUES[0]) :]
    whole = bodies.number or ""
    key = whole.find(KEYS[0])
    if key < 0 or not whole.endswith(f"{NUMBER}{after}"):
        return None
    number_end = whole[key + len(KEYS[0]) : len(whole) - len(f"{NUMBER}{after}")]
    if number_end == tags.key_end:
        return None
    before = common_prefix(tags.key_end, number_end)
    behind = shared_end(tags.key_end[len(before) :], number_end[len(before) :])
    word = without_end(tags.key_end[len(before) :], behind)
    kinds: dict[str, _Types] = {"true": "string", "string": "name"}
    return (before, behind, kinds[word]) if word in kinds else None
