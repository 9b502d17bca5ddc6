"""What is asked: the path and the body of a request for a stream."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from dragoman.client.chunks import ChunkReader
from dragoman.client.events import StreamEvent
from dragoman.client.raw import FIELDS, RawAnswer, RawReader
from dragoman.client.response_events import ResponseReader

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
JSON = {"Content-Type": "application/json", "Accept": "application/json"}
STREAM = {"Content-Type": "application/json", "Accept": "text/event-stream"}


class EventReader(Protocol):
    """The data of one event after the other, to what it tells."""

    @property
    def over(self) -> bool:
        """The answer has come to its end."""

    def read(self, data: bytes) -> Iterator[StreamEvent]: ...


class Request(Struct, frozen=True):
    path: str
    body: Mapping[str, Any]
    raw: RawAnswer | None = None
    """How a completion is to be read, where it is more than text."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Beside those that every request has."""

    def reader(self) -> EventReader:
        if self.raw is not None:
            return RawReader(self.raw, self.body)
        return ResponseReader() if self.path == RESPONSES else ChunkReader()


def chat(messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> Request:
    return _with_usage(CHAT, {"messages": list(messages), **fields})


def completions(
    prompt: str | Sequence[int], fields: Mapping[str, Any], raw: RawAnswer | None = None
) -> Request:
    given = prompt if isinstance(prompt, str) else list(prompt)
    beside = {} if raw is None else FIELDS
    return replace(_with_usage(COMPLETIONS, {"prompt": given, **beside, **fields}), raw=raw)


def responses(input: str | Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> Request:
    given = input if isinstance(input, str) else list(input)
    return Request(RESPONSES, _set({"input": given, **fields, "stream": True}))


def _with_usage(path: str, fields: Mapping[str, Any]) -> Request:
    return Request(path, _set({"stream_options": {"include_usage": True}, **fields, "stream": True}))


def _set(fields: Mapping[str, Any]) -> dict[str, Any]:
    """None means unset, and not every server takes null for that."""
    return {name: value for name, value in fields.items() if value is not None}
