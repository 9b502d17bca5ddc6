"""A stream's events folded into the whole answer. There is no other way to an answer."""

from collections.abc import Iterable

from dragoman.types import Answer, Event, ToolCall

JOINED = frozenset({"text", "reasoning", "call_arguments"})
MOST_IDS = 512
"""Of an event that others are joined to: with more, writing it would take long."""


class _Parts:
    """What one answer has so far, in pieces: joined once, at the end."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.reasonings: list[str] = []
        self.calls: list[tuple[str, str, list[str]]] = []


class Fold:
    """`Fold(2)` holds two answers; `add(events)` grows them."""

    def __init__(self, choices: int = 1) -> None:
        self.answers = [Answer(choice) for choice in range(choices)]
        self._parts = [_Parts() for _ in range(choices)]

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            answer, parts, kind = self.answers[event.choice], self._parts[event.choice], event.kind
            answer.ids += event.ids
            if event.logprobs:
                answer.logprobs += event.logprobs
            if kind == "text":
                parts.texts.append(event.text)
            elif kind == "reasoning":
                parts.reasonings.append(event.text)
            elif kind == "call_arguments":
                parts.calls[event.call][2].append(event.text)
            elif kind == "call_open":
                parts.calls.append((event.call_id, event.text, []))
            elif kind == "finish":
                answer.finish, answer.stop = event.finish, event.stop

    def done(self) -> list[Answer]:
        for answer, parts in zip(self.answers, self._parts, strict=True):
            answer.text, answer.reasoning = "".join(parts.texts), "".join(parts.reasonings)
            answer.calls = [
                ToolCall(id=id_, name=name, arguments="".join(pieces)) for id_, name, pieces in parts.calls
            ]
        return self.answers


def fold(events: Iterable[Event]) -> Answer:
    """The answer that the events of one choice tell."""
    folded = Fold()
    folded.add(events)
    return folded.done()[0]


def coalesce(events: list[Event]) -> list[Event]:
    """Neighbours of one kind and choice become one: what a client that reads slowly gets."""
    merged: list[Event] = []
    runs: dict[int, tuple[Event, list[str]]] = {}
    for event in events:
        before, texts = runs.get(event.choice, (None, []))
        alike = before is not None and before.kind == event.kind and event.kind in JOINED
        if before is not None and alike and len(before.ids) < MOST_IDS:
            texts.append(event.text)
            before.ids = before.ids + event.ids
            if event.logprobs:
                before.logprobs = (before.logprobs or []) + event.logprobs
            continue
        if before is not None:
            before.text = "".join(texts)
        merged.append(event)
        runs[event.choice] = event, [event.text]
    for event, texts in runs.values():
        event.text = "".join(texts)
    return merged
