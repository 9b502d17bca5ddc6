"""Dialects, events and answers as plain data, for commands and routes.

`read_parts` parses a text in chunks and returns the events with the offsets at which they came, and the range
of each part of the answer: reasoning, text and calls, each with the markers around it.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from dragoman.dialects.declarations import Dialect
from dragoman.dialects.parser import AnswerReader, Parser
from dragoman.dialects.render import render
from dragoman.types import Answer, Event, ToolCall

CALL = "call"
PART_KINDS = {"call_open": CALL, "call_arguments": CALL, "call_close": CALL}


def parts_of(dialect: Dialect) -> list[str]:
    """Return what a dialect has beside text, such as `["reasoning", "calls"]`."""
    channels = dialect.channels
    reasoning = dialect.reasoning is not None or (channels is not None and bool(channels.reasoning))
    # A channel that is neither for reasoning nor for text belongs to a tool.
    calls = bool(dialect.calls) or channels is not None
    return [name for name, has in (("reasoning", reasoning), ("calls", calls)) if has]


def describe_dialect(dialect: Dialect, *, examples: bool = False) -> dict[str, Any]:
    parts = parts_of(dialect)
    description: dict[str, Any] = {
        "name": dialect.name,
        "models": dialect.models,
        "aliases": list(dialect.aliases),
        "reasoning": "reasoning" in parts,
        "calls": "calls" in parts,
    }
    return description | ({"example": write_example(dialect)} if examples else {})


def write_example(dialect: Dialect) -> str:
    """Render an answer with reasoning, text and a call, as models of this family write it."""
    parts = parts_of(dialect)
    call = ToolCall(id=None, name="get_weather", arguments='{"city": "Paris"}')
    return render(
        dialect,
        Answer(
            reasoning="They ask for the weather." if "reasoning" in parts else "",
            text="Let me look.",
            calls=[call] if "calls" in parts else [],
        ),
    )


def describe_syntax(dialect: Dialect) -> dict[str, Any]:
    """Return the declared syntax without default values, such as `{"reasoning": {"open": ["<think>"]}}`."""
    fields: dict[str, Any] = {
        "reasoning": dialect.reasoning,
        "calls": [{"shape": type(syntax).__name__, **_plain(syntax)} for syntax in dialect.calls],
        "channels": dialect.channels,
        "drops": dialect.drops,
        "replaced": dialect.replaced,
        "own": "response_template" if dialect.response_template is not None else None,
    }
    return {
        name: _plain(value) if isinstance(value, Struct) else value for name, value in fields.items() if value
    }


def _plain(declared: Struct) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(declared)
    return {name: value for name, value in fields.items() if value}


def answer_json(answer: Answer) -> dict[str, Any]:
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in answer.calls]
    return {"text": answer.text, "reasoning": answer.reasoning, "tool_calls": calls}


def event_json(event: Event) -> dict[str, Any]:
    """Return an event as plain data: `{"kind": "call_open", "call": 0, "id": "call_1", "name": "f"}`."""
    if event.kind == "call_open":
        return {"kind": event.kind, "call": event.call, "id": event.call_id, "name": event.text}
    if event.kind == "call_arguments":
        return {"kind": event.kind, "call": event.call, "arguments": event.text}
    if event.kind == "call_close":
        return {"kind": event.kind, "call": event.call}
    return {"kind": event.kind, "text": event.text}


class AnswerPart(Struct):
    """A stretch of model output with the markers around it, from `begin` up to, not including, `end`."""

    kind: str
    begin: int
    end: int = 0
    call: int | None = None
    name: str | None = None
    """Name of the tool."""


class AnswerPartBuilder:
    """Collects an answer's events, in order, into parts.

    Each event comes with the offset at which its part begins, or None if it continues the last part. Offsets
    count characters or tokens.
    """

    def __init__(self) -> None:
        self.parts: list[AnswerPart] = []

    def add(self, event: Event, begin: int | None, so_far: int) -> None:
        kind = PART_KINDS.get(event.kind, event.kind)
        last = self.parts[-1] if self.parts else None
        goes_on = last is not None and (kind == "unseen" or (begin is None and kind == last.kind))
        if last is None or not goes_on:
            begin = (last.end if last else 0) if begin is None else begin
            if last is not None:
                last.end = begin
            last = AnswerPart(kind, begin)
            self.parts.append(last)
        last.end = so_far
        if event.kind == "call_open":
            last.call, last.name = event.call, event.text

    def done(self, end: int) -> list[AnswerPart]:
        """Return the parts that are not empty; together they cover the whole text."""
        if self.parts:
            self.parts[0].begin, self.parts[-1].end = 0, end
        return [part for part in self.parts if part.end > part.begin]


TimedEvents = list[tuple[int, Event]]
"""Events, each with the number of characters read when it came."""


def read_parts(reader: AnswerReader | Parser, pieces: Iterable[str]) -> tuple[TimedEvents, list[AnswerPart]]:
    events: TimedEvents = []
    finder, read = AnswerPartBuilder(), 0
    for piece in pieces:
        read += len(piece)
        events += [(read, event) for event in reader.feed(piece)]
    events += [(read, event) for event in reader.finish()]
    for at, event in events:
        finder.add(event, None if event.part_chars is None else at - event.part_chars, at)
    return events, finder.done(read)
