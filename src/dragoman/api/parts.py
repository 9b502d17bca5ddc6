"""The parts of messages: texts, and pictures and sounds in all the forms in which clients send them.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,...", "detail": "high"}}   chat
    {"type": "input_audio", "input_audio": {"data": "...", "format": "wav"}}                     chat
    {"type": "input_image", "image_url": "data:image/png;base64,...", "detail": "auto"}          responses
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "..."}}    messages
    {"type": "image", "base64": "...", "mime_type": "image/png"}                                 LangChain
    {"role": "user", "content": "?", "images": ["..."]}                                          Ollama

A picture stays as it was sent, because it may have to be given back; what was read of it goes with it. What
of it a template sees is no more than `{"type": "image", "media": KEY}`.
"""

import binascii
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct, field

from dragoman.errors import TOOLS, BadRequest, shorten
from dragoman.limits import Limits
from dragoman.media import Media, MediaKind, tell_media, unsupported
from dragoman.media.read import check_media, data_url, read_media

Part: TypeAlias = dict[str, Any]
MEDIA_PARTS: Mapping[str, MediaKind] = {
    **dict.fromkeys(("image_url", "input_image", "image"), "image"),
    **dict.fromkeys(("input_audio", "audio_url", "audio"), "audio"),
}
OTHER_PARTS = {"file": "file", "input_file": "file", "video_url": "video", "images": "image"}
"""Nobody takes these, or not there."""
DETAILS = ("auto", "low", "high", "original")
WRAPPED = ("image_url", "input_audio", "audio_url", "source", "image", "audio")
"""Fields of parts that are an object, or the data itself."""
DATA = ("url", "data", "base64")
FORMATS = {"wave": "wav", "x-wav": "wav", "mpeg": "mp3", "x-flac": "flac"}
"""Other names of them."""
WORDS: Mapping[MediaKind, str] = {
    "image": "the picture itself, as in data:image/png;base64,iVBORw0...",
    "audio": "the sound itself, in base64",
}


# Texts.


def part_text(part: Part, place: str) -> str:
    kind = part.get("type")
    if not isinstance(kind, str):
        raise BadRequest(f"'{place}.type' must be a string.", param=f"{place}.type", code="invalid_value")
    # Beside a text, too, a file is not left out in silence.
    other = (
        kind if kind in OTHER_PARTS else next((key for key in part if key in OTHER_PARTS and part[key]), "")
    )
    if other:
        raise unsupported(OTHER_PARTS[other], frozenset(), place)
    key = "refusal" if kind == "refusal" else "text"
    if kind not in ("text", "input_text", "output_text", "refusal"):
        message = f"Unknown content part type {kind[:64]!r}."
        raise BadRequest(message, param=f"{place}.type", code="invalid_value")
    text = part.get(key)
    if not isinstance(text, str):
        raise BadRequest(f"'{place}.{key}' must be a string.", param=f"{place}.{key}", code="invalid_value")
    return text


def tell_part(part: Part, place: str) -> Part:
    """As a template is given it."""
    if isinstance(part, MediaPart):
        return tell_media(part.media)
    return {"type": "text", "text": part_text(part, place)}


def join_parts(parts: Sequence[Part]) -> str:
    """What parts as a template is given them say."""
    return "".join(part["text"] for part in parts if part["type"] == "text")


# Pictures and sounds.


class MediaPart(dict[str, Any]):
    """A part as it was sent, what was read of it, and the field that it is."""

    media: Media
    place: str


class ImageList(list[Any]):
    """The same for pictures beside the content of a message."""

    read: Sequence[MediaPart]


class Gallery(Struct):
    """All that one conversation shows and plays: what `Conversation` has as `media` and `places`."""

    media: dict[str, Media] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, MediaPart):
                self.media.setdefault(part.media.key, part.media)
                self.places.setdefault(part.media.key, part.place)

    def check(self, limits: Limits, place: str) -> None:
        if self.media:
            check_media(self.media.values(), limits, place)


def media_kind(part: Part) -> MediaKind | None:
    """Whether a part shows or plays something: by its type, or by what it has beside a text."""
    kind = part.get("type")
    for name in (kind, *part) if isinstance(kind, str) else ():
        if name in MEDIA_PARTS and (name is kind or part[name]):
            return MEDIA_PARTS[name]
    return None


def read_part(part: Part, limits: Limits, place: str) -> Part:
    """A part that can be used: a picture or a sound is read, whatever else it is it says something."""
    kind = media_kind(part)
    if kind is not None:
        return read_media_part(part, kind, limits, place)
    part_text(part, place)
    return part


def read_media_part(part: Part, kind: MediaKind, limits: Limits, place: str) -> MediaPart:
    if isinstance(part, MediaPart):
        return part
    text, at, given = _find_data(part, kind, place)
    inside = at.rpartition(".")[0]
    detail = given.get("detail") or part.get("detail") or "auto"
    if detail not in DETAILS:
        message = f"'{inside}.detail' must be one of {', '.join(DETAILS)}."
        raise BadRequest(message, param=f"{inside}.detail", code="invalid_value")
    read = MediaPart(part)
    read.place = place
    read.media = read_media(decode_base64(text, kind, limits, at), kind, limits, place, detail)
    if kind == "audio" and given.get("format"):
        _check_format(given["format"], read.media.format, f"{inside}.format")
    return read


def _find_data(part: Part, kind: MediaKind, place: str) -> tuple[str, str, Part]:
    """The data, its field, and the object that it is in: the part, or one in it."""
    given = part
    for name in WRAPPED:
        inside = part.get(name)
        if isinstance(inside, str):
            return inside, f"{place}.{name}", part
        if isinstance(inside, dict):
            given, place = inside, f"{place}.{name}"
            break
    for name in DATA:
        if isinstance(found := given.get(name), str):
            return found, f"{place}.{name}", given
    if given.get("file_id"):
        message = f"'{place}.file_id': no file can be named here; send {WORDS[kind]}."
        raise BadRequest(message, param=f"{place}.file_id", code="unsupported_content")
    raise BadRequest(f"'{place}' needs {WORDS[kind]}.", param=place, code="invalid_value")


def decode_base64(text: str, kind: MediaKind, limits: Limits, place: str) -> bytes:
    """The bytes of `data:image/png;base64,aGk=`, or of what stands behind the comma."""
    start = text[:8].lower()
    if start.startswith(("http://", "https://", "file:")):
        message = f"'{place}': the server fetches nothing; send {WORDS[kind]}."
        raise BadRequest(message, param=place, code="unsupported_content")
    if start.startswith("data:"):
        head, _, text = text.partition(",")
        if not head.lower().endswith(";base64"):
            raise _not_base64(kind, place)
    if len(text) > 2 * limits.media_bytes:
        message = f"'{place}': the file has more than {limits.media_bytes} bytes; make it smaller."
        raise BadRequest(message, param=place, code="limit_exceeded")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return _decode_loosely(text, kind, place)


def _decode_loosely(text: str, kind: MediaKind, place: str) -> bytes:
    """In lines, or without what fills the last group: some write it so."""
    joined = "".join(text.split())
    try:
        return binascii.a2b_base64(joined + "=" * (-len(joined) % 4), strict_mode=True)
    except ValueError:
        raise _not_base64(kind, place) from None


def _not_base64(kind: MediaKind, place: str) -> BadRequest:
    return BadRequest(f"'{place}' is no base64; send {WORDS[kind]}.", param=place, code="invalid_value")


def _check_format(given: Any, found: str, place: str) -> None:
    said = str(given).lower().removeprefix("audio/")
    if FORMATS.get(said, said) != found:
        message = f"'{place}' is {shorten(str(given), 32)!r}, but the sound is {found}."
        raise BadRequest(message, param=place, code="invalid_value")


def spell_shown(shown: str | Media) -> Part:
    """A part of what a tool gave, as a client sends such parts."""
    if isinstance(shown, str):
        return {"type": "input_text", "text": shown}
    if shown.kind == "image":
        part = MediaPart(type="input_image", image_url=data_url(shown), detail=shown.detail)
    else:
        data = b64encode(shown.data).decode()
        part = MediaPart(type="input_audio", input_audio={"data": data, "format": shown.format})
    part.media, part.place = shown, TOOLS
    return part


def read_images(given: Sequence[Any], limits: Limits, place: str) -> ImageList:
    """Pictures beside a text: `["iVBORw0...", ...]`."""
    if isinstance(given, ImageList):
        return given
    read = ImageList(given)
    parts = [one if isinstance(one, dict) else {"image": one} for one in given]
    read.read = [read_media_part(one, "image", limits, f"{place}[{n}]") for n, one in enumerate(parts)]
    return read
