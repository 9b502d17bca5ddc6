"""A stream's events folded into the whole answer. There is no other way to an answer."""

from collections.abc import Iterable

from msgspec import Struct, field

from dragoman.types import Event, FinishReason, TokenLogprob


class Answer(Struct):
    choice: int
    text: str = ""
    reasoning: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | int | None = None

    def mean_logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs) / max(len(self.logprobs), 1)


class Fold:
    """`Fold(2)` holds two answers; `add(events)` grows them."""

    def __init__(self, choices: int) -> None:
        self.answers = [Answer(choice) for choice in range(choices)]
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._reasonings: list[list[str]] = [[] for _ in range(choices)]

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            answer = self.answers[event.choice]
            answer.ids += event.ids
            if event.logprobs:
                answer.logprobs += event.logprobs
            if event.kind == "text":
                self._texts[event.choice].append(event.text)
            elif event.kind == "reasoning":
                self._reasonings[event.choice].append(event.text)
            elif event.kind == "finish":
                answer.finish, answer.stop = event.finish, event.stop

    def done(self) -> list[Answer]:
        for answer, texts, reasonings in zip(self.answers, self._texts, self._reasonings, strict=True):
            answer.text, answer.reasoning = "".join(texts), "".join(reasonings)
        return self.answers


def coalesce(events: list[Event]) -> list[Event]:
    """Neighbours of one kind and choice become one: what a client that reads slowly gets."""
    merged: list[Event] = []
    last: dict[int, Event] = {}
    for event in events:
        before = last.get(event.choice)
        if before is not None and before.kind == event.kind and event.kind in ("text", "reasoning"):
            before.text += event.text
            before.ids = before.ids + event.ids
            if event.logprobs:
                before.logprobs = (before.logprobs or []) + event.logprobs
        else:
            merged.append(event)
            last[event.choice] = event
    return merged
