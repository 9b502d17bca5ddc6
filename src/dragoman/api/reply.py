"""What the replies of Chat Completions and Completions have in common: the envelope, once per stream.

Only the escaped delta and what was asked for beside it goes between an envelope's two halves.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from dragoman.api.sse import DONE, encode, error_event, event, halves
from dragoman.api.usage import usage
from dragoman.types import Event, Usage

HOLE = "\x00"


class Head(Struct, frozen=True):
    """What stays the same over a whole reply."""

    id: str
    created: int
    model: str
    fingerprint: str


class StreamOptions(Struct, frozen=True):
    usage: bool = False
    running_usage: bool = False
    token_ids: bool = False


class Spelling(Protocol):
    """How one API writes the parts in which streams differ."""

    object: str

    def delta(self, event: Event) -> dict[str, Any]:
        """The choice's fields of an event, without index and finish_reason."""

    def finish_reason(self, event: Event) -> str | None: ...


class StreamWriter:
    """Events to bytes. `write` of a plain text delta touches no JSON but the text itself.

    `plain` says that a text delta has nothing beside the text: no log probabilities.
    """

    def __init__(
        self,
        head: Head,
        spelling: Spelling,
        options: StreamOptions,
        used: Callable[[], Usage],
        *,
        plain: bool,
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
        self._plain = plain and not options.token_ids and not options.running_usage
        self._halves: dict[int, tuple[bytes, bytes]] = {}

    def write(self, events: Sequence[Event]) -> bytes:
        if len(events) == 1:
            return self._one(events[0])
        return b"".join([self._one(event) for event in events])

    def _one(self, event: Event) -> bytes:
        if self._plain and event.kind == "text":
            before, after = self._halves.get(event.choice) or self._cut(event.choice)
            return before + encode(event.text) + after
        if event.error is not None:
            return error_event(event.error)
        return self.chunk(event, self._spelling.delta(event))

    def _cut(self, choice: int) -> tuple[bytes, bytes]:
        example = Event("text", choice, HOLE)
        payload = self._payload(example, self._spelling.delta(example))
        self._halves[choice] = halves(payload, HOLE)
        return self._halves[choice]

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
        return {**self._envelope, "choices": [choice], **self._usage_field()}

    def _usage_field(self) -> dict[str, Any]:
        if self._options.running_usage:
            return {"usage": usage(self._used())}
        return {"usage": None} if self._options.usage else {}

    def end(self) -> bytes:
        """After the last choice: the usage, if asked for, and the end mark."""
        if not self._options.usage:
            return DONE
        return event({**self._envelope, "choices": [], "usage": usage(self._used())}) + DONE
