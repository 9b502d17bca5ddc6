"""Answers as xgrammar's structural tags, for engines that constrain with it.

They can say less than our grammars: what stands around the arguments of a call must be the same text each
time, and the arguments JSON. Where that is so is seen from what the renderer writes.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from dragoman.constrain.calls.tool_schemas import ToolSchema
from dragoman.dialects.declare import Dialect
from dragoman.dialects.render import render
from dragoman.types import Answer, ToolCall

Format: TypeAlias = dict[str, Any]

_ARGUMENTS = '{"probe": 0}'


class CallMarkers(Struct, frozen=True):
    """The text around the arguments of calls."""

    section: str
    calls: Mapping[str, str]
    """What opens a call of each tool."""
    close: str
    between: str | None
    """Between two calls; None where it is not always the same, so that there can be one only."""
    end: str


def calls_format(
    dialect: Dialect, tools: Sequence[ToolSchema], *, required: bool, parallel: bool
) -> Format | None:
    """Calls alone where they are required, and else calls in text; None where tags cannot say it."""
    markers = None if dialect.channels or any(tool.lark for tool in tools) else _markers(dialect, tools)
    if markers is None:
        return None
    tags = [
        _tag(markers.calls[tool.name], {"type": "json_schema", "json_schema": tool.schema}, markers.close)
        for tool in tools
    ]
    single = not parallel or markers.between is None
    if required:
        return _section(markers, tags, single=single)
    wrapped = [_section(markers, tags, single=single)] if markers.section else tags
    wrapped = [{**tag, "begin": tag["begin"].lstrip()} for tag in wrapped]
    trigger = _trigger(dialect, reduce(_common_start, (tag["begin"] for tag in wrapped)))
    if not trigger.strip("[{ \n\"'"):
        # Nothing tells a call from text.
        return None
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": wrapped,
        "at_least_one": False,
        "stop_after_first": not parallel,
    }


def _trigger(dialect: Dialect, opening: str) -> str:
    """The marker with which calls begin; what follows it is layout, which a model might forget."""
    shape = dialect.calls[0]
    marks = [mark.strip() for mark in (*(shape.section.open if shape.section else ()), *shape.open)]
    return next((mark for mark in marks if mark and opening.startswith(mark)), opening)


def after_reasoning(dialect: Dialect, rest: Format, *, begun: bool) -> Format:
    """Reasoning first: it may come, or is there already. Without any in the dialect, the rest alone."""
    thinking = dialect.reasoning
    if thinking is None:
        return rest
    close = thinking.close[0].rstrip()
    trail = thinking.close[0][len(close) :]
    inside = _tag("" if begun else thinking.open[0], {"type": "any_text"}, close.lstrip())
    layout = [{"type": "const_string", "value": trail}] if trail else []
    whole = {"type": "sequence", "elements": [inside, *layout, rest]}
    return whole if begun else either([whole, rest])


def either(formats: list[Format]) -> Format:
    return {"type": "or", "elements": formats}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _section(markers: CallMarkers, tags: list[Format], *, single: bool) -> Format:
    group = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": markers.between or "",
        "at_least_one": True,
        "stop_after_first": single,
    }
    return _tag(markers.section, group, markers.end) if markers.section or markers.end else group


def _markers(dialect: Dialect, tools: Sequence[ToolSchema]) -> CallMarkers | None:
    found = [one for tool in tools if (one := _of_one(dialect, tool.name)) is not None]
    calls = {name: text for one in found for name, text in one.calls.items()}
    alike = [replace(one, calls=calls) for one in found]
    if len(found) == len(tools) and all(one == alike[0] for one in alike):
        return alike[0]
    return _single(dialect, tools)


def _of_one(dialect: Dialect, name: str) -> CallMarkers | None:
    """From what three calls look like: what stands between two of them ends one and begins the next."""
    parts = _render_around(dialect, name, name, name)
    if parts is None or parts[1] != parts[2]:
        # Numbers, for example.
        return None
    before, middle, _, after = parts
    close = _common_start(middle, after)
    call = _common_start(middle[len(close) :][::-1], before[::-1])[::-1]
    between = middle[len(close) : len(middle) - len(call)]
    if name not in call or _render_around(dialect, name) != [before, after]:
        return None
    return CallMarkers(before[: len(before) - len(call)], {name: call}, close, between, after[len(close) :])


def _common_start(one: str, other: str) -> str:
    """What both begin with."""
    size = next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return one[:size]


def _single(dialect: Dialect, tools: Sequence[ToolSchema]) -> CallMarkers | None:
    around = {tool.name: _render_around(dialect, tool.name) for tool in tools}
    ends = {None if one is None else one[1] for one in around.values()}
    if len(ends) != 1 or None in ends:
        return None
    calls = {name: one[0] for name, one in around.items() if one is not None}
    return CallMarkers("", calls, ends.pop() or "", None, "")


def _render_around(dialect: Dialect, *names: str) -> list[str] | None:
    """What the renderer writes before, between and after arguments, if it writes them as JSON."""
    calls = [ToolCall(id=None, name=name, arguments=_ARGUMENTS) for name in names]
    parts = render(dialect, Answer(calls=calls)).split(_ARGUMENTS)
    return parts if len(parts) == len(names) + 1 else None
