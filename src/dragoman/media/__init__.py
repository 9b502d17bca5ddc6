"""Pictures and sounds: what is known of one, and where it stands in a prompt."""

from collections.abc import Mapping, Set
from typing import Literal, TypeAlias

from msgspec import Struct

from dragoman.errors import BadRequest

MediaKind: TypeAlias = Literal["image", "audio"]
NAMES = {"image": "images", "audio": "audio", "file": "files", "video": "video"}
"""In words."""


class Media(Struct, frozen=True, kw_only=True):
    """A picture or a sound as its file is: its kind and measures are known from its first bytes, and were
    compared with the limits; it is not decoded."""

    kind: MediaKind
    format: str
    """By its content: png, jpeg, webp, gif; wav, mp3, flac."""
    data: bytes
    digest: str
    """SHA-256 of the file, in hexadecimal: what a prompt knows it by, and every cache."""
    width: int = 0
    height: int = 0
    seconds: float = 0.0
    detail: str = "auto"

    @property
    def key(self) -> str:
        """What a conversation knows it by: a picture that is to be looked at in two ways is two."""
        return self.digest if self.detail == "auto" else f"{self.digest}:{self.detail}"

    def __repr__(self) -> str:
        """Without its data: whoever writes a job into a log does not want a picture there."""
        return f"Media({self.kind!r}, {self.format!r}, {len(self.data)} bytes, {self.digest[:16]!r})"


class MediaSpan(Struct, frozen=True):
    """Where a picture or a sound stands in a prompt: all ids there are those that the engine wants for it."""

    media: Media
    start: int
    count: int


def tell_media(media: Media) -> dict[str, str]:
    """The part of a message that shows it, as a template is given it."""
    return {"type": media.kind, "media": media.key}


def unsupported(kind: str, modalities: Set[MediaKind], place: str | None = None) -> BadRequest:
    """`unsupported("audio", {"image"}, "messages[0].content[1]")`: what a model without ears says."""
    taken = " and ".join(NAMES[each] for each in sorted(modalities, reverse=True))
    takes = f"text and {taken}" if taken else "text only"
    verb = "are" if NAMES[kind].endswith("s") else "is"
    message = f"This model takes {takes}; {NAMES[kind]} {verb} not supported."
    return BadRequest(message, param=place, code="unsupported_content")


def check_modalities(
    media: Mapping[str, Media], places: Mapping[str, str], modalities: Set[MediaKind]
) -> None:
    """Raises for the first of them that a model cannot take."""
    for key, each in media.items():
        if each.kind not in modalities:
            raise unsupported(each.kind, modalities, places.get(key, ""))
