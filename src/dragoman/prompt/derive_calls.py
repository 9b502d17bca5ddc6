"""How a template's family writes calls, read off renderings that differ in one thing each."""

import json
import re
from itertools import islice
from typing import Any

from msgspec import Struct

from dragoman.dialects.declare import BraceCalls, Calls, JsonCalls, NamedCalls, PythonCalls
from dragoman.prompt.derive_tags import tagged_calls
from dragoman.prompt.frames import Bodies, Frame, Span, frame
from dragoman.prompt.probe import IDS, KEYS, NAMES, VALUES

_DECODER = json.JSONDecoder()
_SENTINEL = re.compile("probe(Fn|Key|Val|Text|Mind|id)")


class _Value(Struct, frozen=True):
    """A JSON value in a text."""

    value: Any
    span: Span


def derive_calls(bodies: Bodies) -> Calls | None:
    """The first way of writing that explains what was rendered."""
    for attempt in (_json_calls, _named_calls, _python_calls, _brace_calls, tagged_calls):
        calls = attempt(bodies)
        if calls is not None:
            return None if _SENTINEL.search(str(calls)) else calls
    return None


def _values(body: str, first: str) -> list[_Value]:
    """The JSON values in a text that begin with a bracket of this kind and are not inside one another."""
    found: list[_Value] = []
    place = body.find(first)
    while place >= 0:
        try:
            value, end = _DECODER.raw_decode(body, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            found.append(_Value(value, (place, end)))
        place = body.find(first, end)
    return found


def _json_calls(bodies: Bodies) -> JsonCalls | None:
    """`{"name": ..., "arguments": ...}`, each for itself or in a list."""
    one = _calls_in(bodies.one, "{", 1)
    fields = _fields(one[0].value) if one else None
    if fields is None:
        return None
    lists = _calls_in(bodies.one, "[", 1)
    if not lists:
        two = _calls_in(bodies.two or "", "{", 2)
        framed = frame(bodies, one[0].span, (two[0].span, two[1].span) if len(two) == 2 else None)
        return _in_frame(framed, fields, list="never")
    both = _calls_in(bodies.two or "", "[", 2)
    separate = (both[0].span, both[1].span) if len(both) == 2 else None
    return _in_frame(frame(bodies, lists[0].span, separate), fields, list="must", indent=_indent(bodies.one))


def _calls_in(body: str, first: str, most: int) -> list[_Value]:
    """Those that hold one of the names, as text: a value may be nested too deeply to be printed."""
    found = (each for each in _values(body, first) if any(name in body[slice(*each.span)] for name in NAMES))
    return list(islice(found, most))


def _fields(value: Any) -> dict[str, Any] | None:
    """What the parts of a call are called, found by what was put in."""
    if not isinstance(value, dict):
        return None
    arguments = {KEYS[0]: VALUES[0]}
    if value == {NAMES[0]: arguments}:
        return {"name_is_key": True}
    keys = {
        part: next((key for key, each in value.items() if each == wanted), None)
        for part, wanted in (("name", NAMES[0]), ("arguments", arguments), ("id", IDS[0]))
    }
    if keys["name"] is None or keys["arguments"] is None:
        return None
    fields = {part: (key,) for part, key in keys.items() if key is not None}
    # Models mix these two up, whatever their template says.
    fields["arguments"] += tuple(sorted({"arguments", "parameters"} - {keys["arguments"]}))
    return fields


def _in_frame(framed: Frame, fields: dict[str, Any], **more: Any) -> JsonCalls:
    if not framed.open.strip():
        # Nothing announces a call, so prose that looks like one must stay text till it is one.
        more |= {"whole": True, "needs_arguments": True}
    if framed.several:
        more |= {"several": True, "separator": framed.between, "between": ""}
    return JsonCalls(**(framed.markers() | fields | more))


def _indent(body: str) -> str:
    """`[\\n    {` stands on lines of its own."""
    lead = re.search(r"\[\n([ \t]*)\{", body)
    return lead[1] if lead else ""


def _named_calls(bodies: Bodies) -> NamedCalls | None:
    """The name first, then its arguments as JSON."""
    one = _named_span(bodies.one, 0, 0)
    if one is None:
        return None
    first = _named_span(bodies.two or "", 0, 0)
    second = _named_span(bodies.two or "", 1, first[1]) if first else None
    framed = frame(bodies, one, (first, second) if first and second else None)
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
    ends = [found.span[1] for found in _values(body, "{") if found.value == wanted and found.span[0] > name]
    return (name, ends[0]) if ends else None


def _python_calls(bodies: Bodies) -> PythonCalls | None:
    """`f(a="x")`, with or without brackets around all calls."""
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


def _brace_calls(bodies: Bodies) -> BraceCalls | None:
    """`f{a:<|"|>x<|"|>}`: whatever stands on both sides of a word is its quote."""
    written = re.compile(rf"{NAMES[0]}\{{{KEYS[0]}:(.+?){VALUES[0]}\1\}}", re.DOTALL)
    one = written.search(bodies.one)
    if one is None:
        return None
    two = [
        re.search(rf"{name}\{{{KEYS[0]}:.+?{value}.+?\}}", bodies.two or "")
        for name, value in zip(NAMES, VALUES, strict=True)
    ]
    both = (two[0].span(), two[1].span()) if two[0] and two[1] else None
    framed = frame(bodies, one.span(), both)
    if framed.several or not framed.open.strip():
        return None
    return BraceCalls(quote=one[1], **framed.markers())
