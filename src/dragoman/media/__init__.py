"""Images and audio: properties of a file, and its span in a prompt."""

from collections.abc import Mapping, Set
from typing import Literal, TypeAlias

from msgspec import Struct

from dragoman.errors import BadRequest

MediaKind: TypeAlias = Literal["image", "audio"]
NAMES = {"image": "images", "audio": "audio", "file": "files", "video": "video"}
"""Names of media kinds in error messages."""


class Media(Struct, frozen=True, kw_only=True):
    """An image or audio file, not decoded. Its kind and dimensions come from its first bytes, and were
    checked against the limits.
    """

    kind: MediaKind
    format: str
    """Format by content: png, jpeg, webp, gif; wav, mp3, flac."""
    data: bytes
    digest: str
    """SHA-256 of the file in hexadecimal: its identity in prompts and caches."""
    width: int = 0
    height: int = 0
    seconds: float = 0.0
    detail: str = "auto"

    @property
    def key(self) -> str:
        """Key in a conversation: one image in two details counts as two."""
        return self.digest if self.detail == "auto" else f"{self.digest}:{self.detail}"

    def __repr__(self) -> str:
        """Return a short form without the data, for logs."""
        return f"Media({self.kind!r}, {self.format!r}, {len(self.data)} bytes, {self.digest[:16]!r})"


class MediaSpan(Struct, frozen=True):
    """Span of an image or audio in a prompt: all ids in it are those that the engine
    requires for the media.
    """

    media: Media
    start: int
    count: int


def media_part(media: Media) -> dict[str, str]:
    """Return the part of a message that shows the media, as templates get it."""
    return {"type": media.kind, "media": media.key}


def unsupported(kind: str, modalities: Set[MediaKind], param: str | None = None) -> BadRequest:
    """Return the error of a model without a modality: `unsupported("audio", {"image"},
    "messages[0].content[1]")`.
    """
    taken = " and ".join(NAMES[modality] for modality in sorted(modalities, reverse=True))
    takes = f"text and {taken}" if taken else "text only"
    verb = "are" if NAMES[kind].endswith("s") else "is"
    message = f"This model takes {takes}; {NAMES[kind]} {verb} not supported."
    return BadRequest(message, param=param, code="unsupported_content")


def check_modalities(
    media: Mapping[str, Media], positions: Mapping[str, str], modalities: Set[MediaKind]
) -> None:
    """Raise for the first medium that the model does not support."""
    for key, item in media.items():
        if item.kind not in modalities:
            raise unsupported(item.kind, modalities, positions.get(key, ""))
