"""Files as parts of messages: found in a body before it is read, so that their text can take their place.

    {"type": "file", "file": {"file_id": "file-1"}}                        chat
    {"type": "input_file", "filename": "a.txt", "file_data": "data:..."}   responses
    {"type": "document", "source": {"type": "file", "file_id": "file-1"}}  messages

Only what has such a part is decoded; all else stays as it was sent, byte for byte. A part gives way to one of
text at the same place, so that whatever is wrong with the request is still said of the place where it is.
"""

import binascii
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw, Struct

from dragoman.errors import BadRequest

MARK = b'"file_'
"""Of parts that name a file or bring one; what is written otherwise is no such part."""
BASE64 = b'"base64"'
PURPOSES = frozenset({"user_data", "assistants"})
"""Of files that may be shown to a model."""
_members = msgspec.json.Decoder(dict[str, Raw]).decode
_entries = msgspec.json.Decoder(list[Raw]).decode
_part = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode

Replaced: TypeAlias = Callable[[str], dict[str, Any]]


class FilePart(Struct, frozen=True):
    """A file that is part of a message: one that is kept here, or one that came with it."""

    place: str
    filename: str | None
    file_id: str | None
    data: bytes | None
    replaced: Replaced
    """What stands in its place, with its text."""


class FoundFiles:
    """The files in a body: `found.parts`, and `found.filled(texts)` is the body with their texts."""

    def __init__(self, body: bytes) -> None:
        self.parts: list[FilePart] = []
        self._body = body
        self._changed: list[tuple[str, int, int]] = []
        """Of each part: the field, which of its entries, and which part of that."""
        self._lists: dict[str, list[Raw]] = {}
        self._contents: dict[tuple[str, int], list[Raw]] = {}
        try:
            self._top = _members(body)
            for field in ("messages", "input"):
                if field in self._top and _has_mark(self._top[field]):
                    self._look(field)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # Who reads the body says what is wrong with it.
            self.parts = []

    def _look(self, field: str) -> None:
        self._lists[field] = entries = _entries(self._top[field])
        for number, entry in enumerate(entries):
            if not _has_mark(entry):
                continue
            content = bytes(_members(entry).get("content", b""))
            if content[:1] != b"[":
                continue
            self._contents[field, number] = parts = _entries(content)
            for at, raw in enumerate(parts):
                place = f"{field}[{number}].content[{at}]"
                if _has_mark(raw) and (part := _file_in(_part(raw), place)) is not None:
                    self.parts.append(part)
                    self._changed.append((field, number, at))

    def filled(self, texts: Sequence[str]) -> bytes:
        for (field, number, at), part, text in zip(self._changed, self.parts, texts, strict=True):
            self._contents[field, number][at] = Raw(_encode(part.replaced(text)))
        for (field, number), parts in self._contents.items():
            entry = _members(self._lists[field][number])
            self._lists[field][number] = Raw(_encode({**entry, "content": parts}))
        return _encode({**self._top, **self._lists})


def _has_mark(raw: Raw) -> bool:
    text = bytes(raw)
    return MARK in text or BASE64 in text


def _file_in(part: dict[str, Any], place: str) -> FilePart | None:
    kind = part.get("type")
    if kind == "file" and isinstance(part.get("file"), dict):
        return _file(part["file"], f"{place}.file", _as_text)
    if kind == "input_file":
        return _file(part, place, lambda text: {"type": "input_text", "text": text})
    source = part.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") in ("file", "base64"):

        def replaced(text: str) -> dict[str, Any]:
            return {**part, "source": {"type": "text", "media_type": "text/plain", "data": text}}

        given = {"file_id": source.get("file_id"), "file_data": source.get("data"), "filename": ""}
        return _file(given, f"{place}.source", replaced)
    return None


def _as_text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _file(given: dict[str, Any], place: str, replaced: Replaced) -> FilePart:
    file_id, data, filename = (given.get(name) for name in ("file_id", "file_data", "filename"))
    if given.get("file_url"):
        message = f"'{place}.file_url': the server fetches nothing; upload the file, or send file_data."
        raise BadRequest(message, param=f"{place}.file_url", code="unsupported_content")
    if isinstance(file_id, str) and data is None:
        return FilePart(place, filename if isinstance(filename, str) else None, file_id, None, replaced)
    if not isinstance(data, str) or file_id is not None:
        message = f"'{place}' needs one of file_id and file_data."
        raise BadRequest(message, param=place, code="invalid_value")
    name = filename if isinstance(filename, str) else "file"
    return FilePart(place, name, None, _decoded(data, place), replaced)


def _decoded(data: str, place: str) -> bytes:
    """`data:text/plain;base64,aGk=`, or only what stands behind the comma."""
    encoded = data.partition(",")[2] if data.startswith("data:") else data
    try:
        return binascii.a2b_base64(encoded, strict_mode=True)
    except (binascii.Error, ValueError):
        message = f"'{place}.file_data' is base64, as in data:text/plain;base64,aGk=."
        raise BadRequest(message, param=f"{place}.file_data", code="invalid_value") from None


def introduce(filename: str | None, text: str) -> str:
    """A file as a model sees it."""
    return f'File "{filename}":\n\n{text}' if filename else text
