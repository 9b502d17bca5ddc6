"""What there is to say of dialects, events and answers, as plain data: for commands and for routes alike.

`read_parts` reads a text in pieces of any size and says what came when, and where in the text each part of
the answer stands: its reasoning, its text and its calls, each with the markers around it.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from dragoman.dialects.declare import Dialect
from dragoman.dialects.parser import AnswerReader, Parser
from dragoman.dialects.render import render
from dragoman.types import Answer, Event, ToolCall

CALL = "call"
PART_KINDS = {"call_open": CALL, "call_arguments": CALL, "call_close": CALL}


def parts_of(dialect: Dialect) -> list[str]:
    """What a dialect has beside text: `["reasoning", "calls"]`."""
    channels = dialect.channels
    reasoning = dialect.reasoning is not None or (channels is not None and bool(channels.reasoning))
    # A channel that is neither for reasoning nor for text is a tool's.
    calls = bool(dialect.calls) or channels is not None
    return [name for name, has in (("reasoning", reasoning), ("calls", calls)) if has]


def describe_dialect(dialect: Dialect, *, examples: bool = False) -> dict[str, Any]:
    parts = parts_of(dialect)
    found: dict[str, Any] = {
        "name": dialect.name,
        "models": dialect.models,
        "aliases": list(dialect.aliases),
        "reasoning": "reasoning" in parts,
        "calls": "calls" in parts,
    }
    return found | ({"example": write_example(dialect)} if examples else {})


def write_example(dialect: Dialect) -> str:
    """An answer with reasoning, text and a call, as models of this family write it."""
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


def describe_marks(dialect: Dialect) -> dict[str, Any]:
    """What is declared of it, without what is as in all others: `{"reasoning": {"open": ["<think>"]}}`."""
    told: dict[str, Any] = {
        "reasoning": dialect.reasoning,
        "calls": [{"shape": type(each).__name__, **_plain(each)} for each in dialect.calls],
        "channels": dialect.channels,
        "drops": dialect.drops,
        "replaced": dialect.replaced,
        "own": "response_template" if dialect.own is not None else None,
    }
    return {name: _plain(each) if isinstance(each, Struct) else each for name, each in told.items() if each}


def _plain(declared: Struct) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(declared)
    return {name: value for name, value in found.items() if value}


def spell_answer(answer: Answer) -> dict[str, Any]:
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in answer.calls]
    return {"text": answer.text, "reasoning": answer.reasoning, "tool_calls": calls}


def spell_event(event: Event) -> dict[str, Any]:
    """`{"kind": "call_open", "call": 0, "id": "call_1", "name": "f"}`"""
    if event.kind == "call_open":
        return {"kind": event.kind, "call": event.call, "id": event.call_id, "name": event.text}
    if event.kind == "call_arguments":
        return {"kind": event.kind, "call": event.call, "arguments": event.text}
    if event.kind == "call_close":
        return {"kind": event.kind, "call": event.call}
    return {"kind": event.kind, "text": event.text}


class AnswerPart(Struct):
    """A stretch of what the model wrote, with the markers around it. `end` is not in it any more."""

    kind: str
    begin: int
    end: int = 0
    call: int | None = None
    name: str | None = None
    """Of the tool."""


class PartFinder:
    """Told all events of an answer, in order, each with where its part begins; None: where the last one ends.

    That may be counted in characters or in tokens.
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
        """Those that have anything of what was written, all of it together."""
        if self.parts:
            self.parts[0].begin, self.parts[-1].end = 0, end
        return [part for part in self.parts if part.end > part.begin]


Told = list[tuple[int, Event]]
"""Events, each with how much had been read when it came."""


def read_parts(reader: AnswerReader | Parser, pieces: Iterable[str]) -> tuple[Told, list[AnswerPart]]:
    told: Told = []
    finder, read = PartFinder(), 0
    for piece in pieces:
        read += len(piece)
        told += [(read, event) for event in reader.feed(piece)]
    told += [(read, event) for event in reader.finish()]
    for at, event in told:
        finder.add(event, None if event.begins is None else at - event.begins, at)
    return told, finder.done(read)
