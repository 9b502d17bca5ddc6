"""Path and body of streaming requests."""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from dragoman.client.chunks import ChunkReader
from dragoman.client.errors import FileFormatError
from dragoman.client.events import StreamEvent
from dragoman.client.raw import FIELDS, RawParseOptions, RawReader
from dragoman.client.response_events import ResponseReader
from dragoman.media import MediaKind
from dragoman.media.headers import MEDIA_TYPES, InvalidMedia, find_format

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
JSON = {"Content-Type": "application/json", "Accept": "application/json"}
STREAM = {"Content-Type": "application/json", "Accept": "text/event-stream"}


class EventReader(Protocol):
    """Turns the data of events into stream events."""

    @property
    def is_done(self) -> bool:
        """Whether the answer is complete."""

    def read(self, data: bytes) -> Iterator[StreamEvent]: ...


class Request(Struct, frozen=True):
    path: str
    body: Mapping[str, Any]
    raw: RawParseOptions | None = None
    """How to parse a raw completion, if at all."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of this request, added to the common ones."""

    def reader(self) -> EventReader:
        if self.raw is not None:
            return RawReader(self.raw, self.body)
        return ResponseReader() if self.path == RESPONSES else ChunkReader()


def chat(messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> Request:
    return _with_usage(CHAT, {"messages": list(messages), **fields})


def completions(
    prompt: str | Sequence[int], fields: Mapping[str, Any], raw: RawParseOptions | None = None
) -> Request:
    value = prompt if isinstance(prompt, str) else list(prompt)
    beside = {} if raw is None else FIELDS
    return replace(_with_usage(COMPLETIONS, {"prompt": value, **beside, **fields}), raw=raw)


def responses(input: str | Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> Request:
    value = input if isinstance(input, str) else list(input)
    return Request(RESPONSES, _set({"input": value, **fields, "stream": True}))


def _with_usage(path: str, fields: Mapping[str, Any]) -> Request:
    return Request(path, _set({"stream_options": {"include_usage": True}, **fields, "stream": True}))


def _set(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields that are None, because not every server accepts null for unset."""
    return {name: value for name, value in fields.items() if value is not None}


# Images and audio as content parts.


def image(value: str | Path | bytes, detail: str = "auto") -> dict[str, Any]:
    """Build an image part: `{"role": "user", "content": [{"type": "text", "text": "?"},
    image("cat.png")]}`
    """
    form, data = _read_media(value, "image")
    url = f"data:{MEDIA_TYPES[form]};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}


def audio(value: str | Path | bytes) -> dict[str, Any]:
    """Build an audio part."""
    form, data = _read_media(value, "audio")
    return {"type": "input_audio", "input_audio": {"data": data, "format": form}}


def _read_media(value: str | Path | bytes, kind: MediaKind) -> tuple[str, str]:
    """Read a file; return its format, detected from the content, and its bytes in base64."""
    try:
        data = value if isinstance(value, bytes) else Path(value).read_bytes()
        return find_format(data, kind), b64encode(data).decode()
    except OSError as error:
        raise FileFormatError(f"{value!s} cannot be read: {error.strerror}.") from error
    except InvalidMedia as error:
        raise FileFormatError(f"{'The data' if isinstance(value, bytes) else value}: {error}") from None
