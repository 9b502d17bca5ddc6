"""From the events of a completions or chat stream to steps."""

import msgspec
from msgspec import Struct

from dragoman.client.chunks import entries_of
from dragoman.client.events import Token
from dragoman.client.wire import Logprobs, UsageCounts
from dragoman.engines.protocol import Tokenizer
from dragoman.errors import EngineFailed
from dragoman.types import FinishReason, Job, Step, TextStep, TokenLogprob


class _StreamDelta(Struct):
    """Delta of a chat stream, where ids come beside the parsed content."""

    content: str | None = None


class _StreamChoice(Struct):
    text: str | None = None
    delta: _StreamDelta | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _StreamChunk(Struct):
    """The fields of a chunk that are used."""

    choices: list[_StreamChoice] = msgspec.field(default_factory=list)
    usage: UsageCounts | None = None


_decode = msgspec.json.Decoder(_StreamChunk).decode
_FINISHES: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "tool_calls": "stop",
}


class StreamStepReader:
    """Converts a stream's events: `read_event` returns the step to pass on at once, `last` the one that ends
    the answer.

    If `sampled` is false the upstream returns text without ids.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, *, sampled: bool) -> None:
        self._job = job
        self._size = len(tokenizer.pieces)
        self._sampled = sampled
        self._wanted = job.sampling.logprobs
        self._ends = tokenizer.end_ids | job.sampling.stop_token_ids
        self._held: Step | None = None
        """A step whose last id may end the answer, so that it must be passed on with the finish."""
        self._choice: _StreamChoice | None = None
        """The choice that had the finish."""
        self._cached: int | None = None
        self._prompt: int | None = None
        """The prompt's tokens as counted by the upstream, which alone knows the size of media."""

    @property
    def finished(self) -> bool:
        return self._choice is not None

    @property
    def held(self) -> list[int]:
        """Ids that were received and not passed on."""
        return [] if self._held is None else self._held.ids

    def read_event(self, data: bytes) -> Step | None:
        """Handle one event. Raises msgspec's errors for invalid events, and EngineFailed for impossible
        values.
        """
        chunk = _decode(data)
        if chunk.usage is not None:
            usage = chunk.usage.usage()
            self._cached = usage.cached_tokens
            if self._job.media and usage.prompt_tokens:
                self._prompt, self._cached = usage.prompt_tokens, usage.cached_tokens or 0
        if not chunk.choices or self._choice is not None:
            return None
        choice = chunk.choices[0]
        if choice.finish_reason is not None:
            self._choice = choice
        return self._hear_ids(choice) if self._sampled else self._hear_text(choice)

    def _hear_text(self, choice: _StreamChoice) -> Step | None:
        text = choice.text if choice.delta is None else choice.delta.content
        return TextStep([], text=text) if text else None

    def _hear_ids(self, choice: _StreamChoice) -> Step | None:
        ids = choice.token_ids
        if not ids:
            if choice.text:
                raise EngineFailed("The upstream returned text without its token ids.")
            return None
        for id_ in ids:
            if not 0 <= id_ < self._size:
                raise EngineFailed("The upstream returned an id that is not in the vocabulary.")
        step = Step(ids)
        if self._wanted is not None:
            step.logprobs = _logprobs(ids, entries_of(choice.logprobs), self._wanted)
        if self._held is not None:
            step, self._held = _join(self._held, step), None
        if step.ids[-1] not in self._ends and self._choice is None:
            return step
        self._held = step
        return None

    def last(self) -> Step:
        if self._choice is None:
            raise EngineFailed("The upstream did not send a finish reason.")
        finish = _FINISHES.get(self._choice.finish_reason or "")
        if finish is None:
            raise EngineFailed(f"The upstream sent an unknown finish reason: {self._choice.finish_reason}.")
        step = self._held or (Step([]) if self._sampled else TextStep([]))
        step.finish, step.cached_tokens, step.prompt_tokens = finish, self._cached, self._prompt
        stop = self._choice.stop_reason
        step.stop_id = stop if isinstance(stop, int) and stop in self._job.sampling.stop_token_ids else None
        return step


def _join(first: Step, second: Step) -> Step:
    logprobs = None if first.logprobs is None else first.logprobs + (second.logprobs or [])
    return Step(first.ids + second.ids, logprobs=logprobs)


def _logprobs(ids: list[int], entries: list[Token], wanted: int) -> list[TokenLogprob]:
    if len(entries) != len(ids):
        raise EngineFailed("The upstream did not return the requested log probabilities.")
    logprobs = []
    for id_, token in zip(ids, entries, strict=True):
        if token.logprob is None:
            raise EngineFailed("The upstream did not return the requested log probabilities.")
        top = [(one.id, one.logprob) for one in token.top if one.id is not None and one.logprob is not None]
        top.sort(key=lambda entry: -entry[1])
        logprobs.append(TokenLogprob(id_, token.logprob, tuple(top[:wanted])))
    return logprobs
