"""One continuation on its way from steps to events: ids to text, stop strings, the dialect."""

from collections.abc import Sequence

from dragoman.dialects.reader import Fragment, Reader
from dragoman.turns.detokenize import Detokenizer
from dragoman.turns.stops import StopFinder
from dragoman.types import Event, FinishReason, Step, TokenLogprob


class ChoiceReader:
    """`read(step)` gives the events of a step. An id belongs to the event in which its text comes out."""

    def __init__(
        self,
        choice: int,
        text: Detokenizer,
        stops: StopFinder | None,
        dialect: Reader,
        *,
        min_tokens: int = 0,
        hidden_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.choice = choice
        self.count = 0
        self.over = False
        self._text = text
        self._stops = stops
        self._dialect = dialect
        self._min_tokens = min_tokens
        self._hidden_ids = hidden_ids
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def read(self, step: Step) -> list[Event]:
        events: list[Event] = []
        ids, logprobs = step.ids, step.logprobs
        for position, id_ in enumerate(ids):
            self.count += 1
            self._ids.append(id_)
            if logprobs is not None:
                self._logprobs.append(logprobs[position])
            text = "" if self._ends(step, position) else self._text.feed(id_)
            if not text:
                continue
            if self._stops is not None and self.count >= self._min_tokens:
                text, stop = self._stops.feed(text)
                if stop is not None:
                    self._emit(events, self._dialect.feed(text))
                    self._finish(events, "stop", stop)
                    return events
            if text:
                self._emit(events, self._dialect.feed(text))
        if step.finish is not None:
            self._finish(events, step.finish, step.stop_id, step.error)
        return events

    def _ends(self, step: Step, position: int) -> bool:
        """The id that ends an answer is no part of its text, even where special tokens are shown."""
        return (
            step.finish == "stop" and position == len(step.ids) - 1 and step.ids[position] in self._hidden_ids
        )

    def _finish(
        self,
        events: list[Event],
        finish: FinishReason,
        stop: str | int | None,
        error: Exception | None = None,
    ) -> None:
        self.over = True
        if not isinstance(stop, str):
            self._flush(events)
        self._emit(events, self._dialect.close())
        event = Event("finish", self.choice, "", self._ids, self._logprobs or None, finish, stop, error)
        events.append(event)
        self._ids, self._logprobs = [], []

    def _flush(self, events: list[Event]) -> None:
        """The answer ends without a stop string: what was held back for one is text."""
        text = self._text.flush()
        hit: str | None = None
        if self._stops is not None:
            shown, hit = self._stops.feed(text)
            text = shown if hit else shown + self._stops.flush()
        if text:
            self._emit(events, self._dialect.feed(text))

    def _emit(self, events: list[Event], fragments: Sequence[Fragment]) -> None:
        for kind, text in fragments:
            if text or kind != "text":
                events.append(Event(kind, self.choice, text, self._ids, self._logprobs or None))
                self._ids, self._logprobs = [], []
