"""Pictures and sounds that nobody decodes, and a model that has two ids for each of them."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from dragoman.media import Media, MediaKind
from dragoman.types import Conversation, Message
from tests.support.seams import Model

SIGHT = Path(__file__).parent.parent / "corpus" / "sight"
SHOWN = "undund"
"""What the ids of a picture say: words that no encoder gives."""


def shown(name: str = "a", kind: MediaKind = "image", detail: str = "auto") -> Media:
    data = name.encode()
    digest = sha256(data).hexdigest()
    measures = {"width": 64, "height": 32} if kind == "image" else {"seconds": 1.5}
    form = "png" if kind == "image" else "wav"
    return Media(kind=kind, format=form, data=data, digest=digest, detail=detail, **measures)


def says(role: Any, *parts: str | Media, **more: Any) -> Message:
    """`says("user", "What is", shown(), "?")`."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind, "media": part.digest}
        for part in parts
    ]
    return Message(role=role, content=content, **more)


def conversation(messages: Sequence[Message], *media: Media, **more: Any) -> Conversation:
    return Conversation(messages=tuple(messages), media={each.digest: each for each in media}, **more)


def sighted(name: str, *kinds: MediaKind) -> Model:
    """The model of a template in the corpus, which sees and hears."""
    return Model((SIGHT / f"{name}.jinja").read_text(), modalities=kinds or ("image", "audio"))
