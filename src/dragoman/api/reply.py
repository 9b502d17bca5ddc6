"""What the replies of Chat Completions and Completions have in common: the envelope, once per stream.

Only the escaped delta and what was asked for beside it goes between an envelope's parts.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from dragoman.api.error_spelling import ErrorSpelling
from dragoman.api.sse import DONE, around, encode, event
from dragoman.api.weights import weight_field
from dragoman.types import Answer, Event, Usage


def usage(counted: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counted.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": counted.reasoning_tokens},
    }


ID_BYTES, LOGPROB_BYTES = 8, 64
"""What one takes in JSON, about."""
HOLE = "\x00"
FRAGMENTS = frozenset({"text", "reasoning", "call_arguments"})
"""Events that are nothing but a piece of text: what almost all of a stream is made of."""


class Head(Struct, frozen=True):
    """What stays the same over a whole reply."""

    id: str
    created: int
    model: str
    fingerprint: str


class ChunkOptions(Struct, frozen=True):
    usage: bool = False
    running_usage: bool = False
    token_ids: bool = False


class Spelling(Protocol):
    """How one API writes the parts in which streams differ."""

    object: str

    @property
    def errors(self) -> ErrorSpelling: ...

    def silent(self, event: Event) -> bool:
        """Whether an event says nothing by itself: it is written only for what was asked for beside it."""

    def delta(self, event: Event) -> dict[str, Any]:
        """The choice's fields of an event, without index and finish_reason."""

    def finish_reason(self, event: Event) -> str | None: ...


def about_bytes(answers: Iterable[Answer], told_ids: int = 0, beside_each: int = 0) -> int:
    """About how long a reply with these answers is, and so many ids of prompts with log probabilities."""
    size = (ID_BYTES + LOGPROB_BYTES * beside_each) * told_ids
    for answer in answers:
        size += len(answer.text) + len(answer.reasoning) + sum(len(call.arguments) for call in answer.calls)
        size += ID_BYTES * len(answer.ids)
        if answer.logprobs:
            size += LOGPROB_BYTES * len(answer.logprobs) * (1 + len(answer.logprobs[0].top))
    return size


class StreamWriter:
    """Events to bytes. `write` of a plain fragment touches no JSON but the text itself.

    `plain` says that a delta has nothing beside its text: no log probabilities. `weights` is asked where a
    choice ends.
    """

    def __init__(
        self,
        head: Head,
        spelling: Spelling,
        options: ChunkOptions,
        used: Callable[[], Usage],
        *,
        plain: bool,
        weights: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._envelope = {
            "id": head.id,
            "object": spelling.object,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._spelling = spelling
        self._options = options
        self._used = used
        self._weights = weights
        self._logprobs = not plain
        self._plain = plain and not options.token_ids and not options.running_usage
        self._parts: dict[tuple[str, int, int], tuple[bytes, ...]] = {}

    def write(self, events: Sequence[Event]) -> bytes:
        if len(events) == 1:
            return self._one(events[0])
        return b"".join([self._one(event) for event in events])

    def _one(self, event: Event) -> bytes:
        if self._plain and event.kind in FRAGMENTS:
            key = (event.kind, event.choice, event.call)
            parts = self._parts.get(key)
            if parts is None:
                parts = self._parts[key] = self._cut(event)
            return encode(event.text).join(parts)
        if event.error is not None:
            return self._spelling.errors.event(event.error)
        if self._spelling.silent(event) and not self._beside(event):
            return b""
        return self.chunk(event, self._spelling.delta(event))

    def _beside(self, event: Event) -> bool:
        """Whether an event has ids or log probabilities that the client would miss."""
        return bool((self._options.token_ids and event.ids) or (self._logprobs and event.logprobs))

    def _cut(self, event: Event) -> tuple[bytes, ...]:
        example = Event(event.kind, event.choice, HOLE, call=event.call)
        if self._spelling.silent(example):
            return ()
        return around(self._payload(example, self._spelling.delta(example)), HOLE)

    def chunk(self, about: Event, fields: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        return event({**self._payload(about, fields), **(extra or {})})

    def _payload(self, about: Event, fields: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": about.choice,
            **fields,
            "finish_reason": self._spelling.finish_reason(about),
        }
        if about.kind == "finish":
            choice["stop_reason"] = about.stop
        if self._options.token_ids:
            choice["token_ids"] = about.ids
        ends = weight_field(self._weights()) if about.kind == "finish" else {}
        return {**self._envelope, "choices": [choice], **self._usage_field(), **ends}

    def _usage_field(self) -> dict[str, Any]:
        if self._options.running_usage:
            return {"usage": usage(self._used())}
        return {"usage": None} if self._options.usage else {}

    def end(self) -> bytes:
        """After the last choice: the usage, if asked for, and the end mark."""
        if not self._options.usage:
            return DONE
        counted = {"usage": usage(self._used()), **weight_field(self._weights())}
        return event({**self._envelope, "choices": [], **counted}) + DONE
