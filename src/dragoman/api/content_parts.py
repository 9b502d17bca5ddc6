"""Content parts of messages: text, images and audio in all forms that clients send.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,...", "detail": "high"}}   chat
    {"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}                     chat
    {"type": "input_image", "image_url": "data:image/png;base64,...", "detail": "auto"}          responses
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "..."}}    messages
    {"type": "image", "base64": "...", "mime_type": "image/png"}                                 LangChain
    {"role": "user", "content": "?", "images": ["..."]}                                          Ollama

A media part keeps the form in which it was sent, because it may have to be returned; the decoded media is
attached to it. A template sees only `{"type": "image", "media": KEY}`.
"""

import binascii
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct, field

from dragoman.errors import TOOLS, BadRequest, shorten
from dragoman.limits import Limits
from dragoman.media import Media, MediaKind, media_part, unsupported
from dragoman.media.headers import check_media, data_url, read_media

Part: TypeAlias = dict[str, Any]
MEDIA_PARTS: Mapping[str, MediaKind] = {
    **dict.fromkeys(("image_url", "input_image", "image"), "image"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "audio"),
}
OTHER_PARTS = {"file": "file", "input_file": "file", "video_url": "video", "images": "image"}
"""Part types that no model takes, or that are not allowed in this position."""
DETAILS = ("auto", "low", "high", "original")
WRAPPED = ("image_url", "input_audio", "audio_url", "source", "image", "audio")
"""Fields of parts that contain an object with the data, or the data itself."""
DATA = ("url", "data", "base64")
FORMATS = {"wave": "wav", "x-wav": "wav", "mpeg": "mp3", "x-flac": "flac"}
"""Other names of audio formats."""
WORDS: Mapping[MediaKind, str] = {
    "image": "the image itself, as in data:image/png;base64,iVBORw0...",
    "audio": "the audio itself, in base64",
}


# Text.


def part_text(part: Part, param_path: str) -> str:
    kind = part.get("type")
    if not isinstance(kind, str):
        raise BadRequest(
            f"'{param_path}.type' must be a string.", param=f"{param_path}.type", code="invalid_value"
        )
    # A file beside a text must not be dropped silently.
    other = (
        kind if kind in OTHER_PARTS else next((key for key in part if key in OTHER_PARTS and part[key]), "")
    )
    if other:
        raise unsupported(OTHER_PARTS[other], frozenset(), param_path)
    key = "refusal" if kind == "refusal" else "text"
    if kind not in ("text", "input_text", "output_text", "refusal"):
        message = f"Unknown content part type {kind[:64]!r}."
        raise BadRequest(message, param=f"{param_path}.type", code="invalid_value")
    text = part.get(key)
    if not isinstance(text, str):
        raise BadRequest(
            f"'{param_path}.{key}' must be a string.", param=f"{param_path}.{key}", code="invalid_value"
        )
    return text


def template_part(part: Part, param_path: str) -> Part:
    """Return the part as the template receives it."""
    if isinstance(part, MediaPart):
        return media_part(part.media)
    return {"type": "text", "text": part_text(part, param_path)}


def join_parts(parts: Sequence[Part]) -> str:
    """Join the texts of parts in the template's form."""
    return "".join(part["text"] for part in parts if part["type"] == "text")


# Images and audio.


class MediaPart(dict[str, Any]):
    """A part as it was sent, with its decoded media and its field."""

    media: Media
    param: str


class ImageList(list[Any]):
    """The `images` of a message as they were sent, with their decoded media."""

    read: Sequence[MediaPart]


class ConversationMedia(Struct):
    """All media of one conversation: the `media` and `params` of `Conversation`."""

    media: dict[str, Media] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, MediaPart):
                self.media.setdefault(part.media.key, part.media)
                self.params.setdefault(part.media.key, part.param)

    def check(self, limits: Limits, param_path: str) -> None:
        if self.media:
            check_media(self.media.values(), limits, param_path)


def media_kind(part: Part) -> MediaKind | None:
    """Return the media kind of a part, by its type or by a field beside a text, or None."""
    kind = part.get("type")
    for name in (kind, *part) if isinstance(kind, str) else ():
        if name in MEDIA_PARTS and (name is kind or part[name]):
            return MEDIA_PARTS[name]
    return None


def read_part(part: Part, limits: Limits, param_path: str) -> Part:
    """Validate a part; the media of an image or audio part is decoded."""
    kind = media_kind(part)
    if kind is not None:
        return read_media_part(part, kind, limits, param_path)
    part_text(part, param_path)
    return part


def read_media_part(part: Part, kind: MediaKind, limits: Limits, param_path: str) -> MediaPart:
    if isinstance(part, MediaPart):
        return part
    text, at, fields = _find_data(part, kind, param_path)
    inside = at.rpartition(".")[0]
    detail = fields.get("detail") or part.get("detail") or "auto"
    if detail not in DETAILS:
        message = f"'{inside}.detail' must be one of {', '.join(DETAILS)}."
        raise BadRequest(message, param=f"{inside}.detail", code="invalid_value")
    read = MediaPart(part)
    read.param = param_path
    read.media = read_media(decode_base64(text, kind, limits, at), kind, limits, param_path, detail)
    if kind == "audio" and fields.get("format"):
        _check_format(fields["format"], read.media.format, f"{inside}.format")
    return read


def _find_data(part: Part, kind: MediaKind, param_path: str) -> tuple[str, str, Part]:
    """Return the data, the name of its field, and the object that contains it: the part, or one within it."""
    fields = part
    for name in WRAPPED:
        inside = part.get(name)
        if isinstance(inside, str):
            return inside, f"{param_path}.{name}", part
        if isinstance(inside, dict):
            fields, param_path = inside, f"{param_path}.{name}"
            break
    for name in DATA:
        if isinstance(value := fields.get(name), str):
            return value, f"{param_path}.{name}", fields
    if fields.get("file_id"):
        message = f"'{param_path}.file_id' is not supported here; send {WORDS[kind]}."
        raise BadRequest(message, param=f"{param_path}.file_id", code="unsupported_content")
    raise BadRequest(f"'{param_path}' needs {WORDS[kind]}.", param=param_path, code="invalid_value")


def decode_base64(text: str, kind: MediaKind, limits: Limits, param_path: str) -> bytes:
    """Decode `data:image/png;base64,aGk=`, or only the part after the comma."""
    start = text[:8].lower()
    if start.startswith(("http://", "https://", "file:")):
        message = f"'{param_path}': the server does not fetch URLs here; send {WORDS[kind]}."
        raise BadRequest(message, param=param_path, code="unsupported_content")
    if start.startswith("data:"):
        head, _, text = text.partition(",")
        if not head.lower().endswith(";base64"):
            raise _not_base64(kind, param_path)
    if len(text) > 2 * limits.media_bytes:
        message = f"'{param_path}': the file has more than {limits.media_bytes} bytes; make it smaller."
        raise BadRequest(message, param=param_path, code="limit_exceeded")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return _decode_loosely(text, kind, param_path)


def _decode_loosely(text: str, kind: MediaKind, param_path: str) -> bytes:
    """Decode base64 with line breaks or without padding, as some clients send it."""
    joined = "".join(text.split())
    try:
        return binascii.a2b_base64(joined + "=" * (-len(joined) % 4), strict_mode=True)
    except ValueError:
        raise _not_base64(kind, param_path) from None


def _not_base64(kind: MediaKind, param_path: str) -> BadRequest:
    return BadRequest(
        f"'{param_path}' is not valid base64; send {WORDS[kind]}.", param=param_path, code="invalid_value"
    )


def _check_format(result: Any, text: str, param_path: str) -> None:
    value = str(result).lower().removeprefix("audio/")
    if FORMATS.get(value, value) != text:
        message = (
            f"'{param_path}' is {shorten(str(result), 32)!r}, but the audio is {text}; send its own format."
        )
        raise BadRequest(message, param=param_path, code="invalid_value")


def spell_shown(shown: str | Media) -> Part:
    """Format a part of a tool result the way clients send parts."""
    if isinstance(shown, str):
        return {"type": "input_text", "text": shown}
    if shown.kind == "image":
        part = MediaPart(type="input_image", image_url=data_url(shown), detail=shown.detail)
    else:
        data = b64encode(shown.data).decode()
        part = MediaPart(type="input_audio", input_audio={"data": data, "format": shown.format})
    part.media, part.param = shown, TOOLS
    return part


def read_images(items: Sequence[Any], limits: Limits, param_path: str) -> ImageList:
    """Decode images beside a text: `["iVBORw0...", ...]`."""
    if isinstance(items, ImageList):
        return items
    read = ImageList(items)
    parts = [part if isinstance(part, dict) else {"image": part} for part in items]
    read.read = [read_media_part(part, "image", limits, f"{param_path}[{n}]") for n, part in enumerate(parts)]
    return read
