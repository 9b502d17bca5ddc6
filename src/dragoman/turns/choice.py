"""One continuation on its way from steps to events: ids to text, stop strings, the dialect."""

from collections.abc import Sequence

from dragoman.dialects.parser import AnswerReader
from dragoman.turns.detokenize import Detokenizer
from dragoman.turns.stops import StopFinder
from dragoman.types import Event, FinishReason, Step, TokenLogprob


class ChoiceReader:
    """Reads steps into events. An id belongs to the event in which its text comes out."""

    def __init__(
        self,
        choice: int,
        text: Detokenizer,
        stops: StopFinder | None,
        dialect: AnswerReader,
        *,
        min_tokens: int = 0,
        hidden_ids: frozenset[int] = frozenset(),
        most_calls: int | None = None,
    ) -> None:
        self.choice = choice
        self.count = 0
        self.ids: list[int] = []
        """All that were sampled."""
        self.logprobs: list[float] = []
        self.reasoning_count = 0
        self.over = False
        self._text = text
        self._stops = stops
        self._dialect = dialect
        self._min_tokens = min_tokens
        self._hidden_ids = hidden_ids
        self._most_calls = most_calls
        self._enough = False
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def read(self, step: Step, events: list[Event]) -> None:
        """Append the events of a step."""
        logprobs = step.logprobs
        # The id that ends an answer is no part of its text, even where special tokens are shown.
        last = len(step.ids) - 1 if step.finish == "stop" else -1
        for position, id_ in enumerate(step.ids):
            self.count += 1
            self._ids.append(id_)
            self.ids.append(id_)
            if logprobs is not None:
                self._logprobs.append(logprobs[position])
                self.logprobs.append(logprobs[position].logprob)
            if position == last and id_ in self._hidden_ids:
                continue
            text = self._text.feed(id_)
            if text and self._stops is not None and self.count >= self._min_tokens:
                text, stop = self._stops.feed(text)
                if stop is not None:
                    self._say(text, events)
                    self._finish(events, "stop", stop)
                    return
            if text:
                self._say(text, events)
                if self._enough:
                    self._finish(events, "stop", None)
                    return
        if step.finish is not None:
            self._finish(events, step.finish, step.stop_id, step.error)

    def fail(self, error: Exception, events: list[Event]) -> None:
        """End it without another look at what was held back."""
        self.over = True
        events.append(Event("finish", self.choice, "", self._ids, None, "error", None, error))

    def _finish(
        self,
        events: list[Event],
        finish: FinishReason,
        stop: str | int | None,
        error: Exception | None = None,
    ) -> None:
        self.over = True
        if not isinstance(stop, str) and not self._enough:
            self._flush(events)
        self._emit(self._dialect.finish(), events)
        event = Event("finish", self.choice, "", self._ids, self._logprobs or None, finish, stop, error)
        events.append(event)
        self._ids, self._logprobs = [], []

    def _flush(self, events: list[Event]) -> None:
        """The answer ends without a stop string: what was held back for one is text."""
        text = self._text.flush()
        if self._stops is not None:
            shown, hit = self._stops.feed(text)
            text = shown if hit else shown + self._stops.flush()
        self._say(text, events)

    def _say(self, text: str, events: list[Event]) -> None:
        if text:
            self._emit(self._dialect.feed(text), events)

    def _emit(self, said: Sequence[Event], events: list[Event]) -> None:
        for event in said:
            if self._enough or (event.kind == "call_open" and event.call == self._most_calls):
                # What follows is not asked for; its ids go with the finish.
                self._enough = True
                return
            ids = self._ids
            event.choice, event.ids, event.logprobs = self.choice, ids, self._logprobs or None
            if event.kind == "reasoning":
                self.reasoning_count += len(ids)
            events.append(event)
            self._ids = []
            if self._logprobs:
                self._logprobs = []
