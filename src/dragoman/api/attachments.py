"""Files in messages: located in a body before it is parsed, so that their contents can replace them.

    {"type": "file", "file": {"file_id": "file-1"}}                              chat
    {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}       chat
    {"type": "input_file", "filename": "a.txt", "file_data": "data:..."}         responses
    {"type": "input_image", "file_id": "file-2"}                                 responses
    {"type": "document", "source": {"type": "file", "file_id": "file-1"}}        messages
    {"type": "image", "source": {"type": "url", "url": "https://a.example/b"}}   messages

Only content that has such a part is decoded; all else stays as sent, byte for byte. A part is replaced in the
list by parts of text or inline bytes, and later errors still name the right field. Parts with inline image
bytes are not changed.
"""

import binascii
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw, Struct

from dragoman.errors import BadRequest
from dragoman.media import MediaKind

MARKS = re.compile(rb'"(?:file_|base64"|http)')
"""Every part that names or contains a file matches this. One regular expression searches all bodies quickly,
because requests without files wait for the search too."""
PURPOSES = frozenset({"user_data", "assistants", "vision"})
"""Purposes of stored files that a model may read."""
LISTS = ("messages", "input", "items")
DEPTH = 3
"""Nesting of lists: messages, parts, parts of a tool result."""
_members = msgspec.json.Decoder(dict[str, Raw]).decode
_entries = msgspec.json.Decoder(list[Raw]).decode
_part = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class InlineMedia(Struct, frozen=True):
    """An image or audio that replaces a part."""

    kind: MediaKind
    format: str
    media_type: str
    base64: str

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.base64}"


Piece: TypeAlias = str | InlineMedia
"""A fragment of a file's contents."""
Written: TypeAlias = Callable[[Piece, bool], dict[str, Any]]
"""Builds the part for a fragment; the flag says whether the fragment is the first of its file."""


class FilePart(Struct, frozen=True):
    """A file in a message: stored here, sent inline, or to be fetched."""

    param: str
    written: Written
    kind: MediaKind | None = None
    """The media kind that it must have; None allows any supported file."""
    filename: str | None = None
    file_id: str | None = None
    data: bytes | None = None
    url: str | None = None


class _Entries:
    """A list with the entries to replace: its own, or those of lists within it."""

    def __init__(self, raw: Raw, param_path: str, parts: list[FilePart], depth: int) -> None:
        self.raw = _entries(raw)
        self.parts: dict[int, FilePart] = {}
        self.within: list[tuple[int, str, _Entries]] = []
        for number, entry in enumerate(self.raw):
            if not MARKS.search(bytes(entry)):
                continue
            here = f"{param_path}[{number}]"
            members = _members(entry)
            if b'"type"' in bytes(entry) and (part := _file_in(entry, members, here)) is not None:
                self.parts[number] = part
                parts.append(part)
                continue
            for field in ("content", "output"):
                inner = members.get(field)
                if depth and inner is not None and _is_list(inner) and MARKS.search(bytes(inner)):
                    within = _Entries(inner, f"{here}.{field}", parts, depth - 1)
                    self.within.append((number, field, within))

    def filled(self, pieces: dict[int, Sequence[Piece]]) -> list[Any]:
        items: list[Any] = list(self.raw)
        for number, field, within in self.within:
            items[number] = {**_members(items[number]), field: within.filled(pieces)}
        for number in sorted(self.parts, reverse=True):
            part = self.parts[number]
            written = [part.written(piece, not at) for at, piece in enumerate(pieces[id(part)])]
            items[number : number + 1] = written
        return items


class BodyAttachments:
    """The files in a body: `files.parts`; `files.filled(pieces)` is the body with their contents."""

    def __init__(self, body: bytes) -> None:
        self.parts: list[FilePart] = []
        self.model: str | None = None
        self._body = body
        self._lists: dict[str, _Entries] = {}
        try:
            self._top = _members(body)
            for field in LISTS:
                if (raw := self._top.get(field)) is not None and _is_list(raw):
                    self._lists[field] = _Entries(raw, field, self.parts, DEPTH)
            if self.parts and "model" in self._top:
                self.model = msgspec.json.decode(self._top["model"], type=str)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # Parsing the body reports what is wrong with it.
            self.parts = []

    def filled(self, pieces: Sequence[Sequence[Piece]]) -> bytes:
        by_part = {id(part): each for part, each in zip(self.parts, pieces, strict=True)}
        lists = {field: entries.filled(by_part) for field, entries in self._lists.items()}
        return _encode({**self._top, **lists})


def _is_list(raw: Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b"["


# The file parts of each API, and their replacements.


def _file_in(entry: Raw, members: dict[str, Raw], param_path: str) -> FilePart | None:
    find = FINDERS.get(bytes(members.get("type", b"")))
    return find(_part(entry), param_path) if find is not None else None


def _in_chat(part: dict[str, Any], param_path: str) -> FilePart | None:
    value = part.get("file")
    return _file(value, f"{param_path}.file", _as_chat) if isinstance(value, dict) else None


def _in_input_file(part: dict[str, Any], param_path: str) -> FilePart | None:
    return _file(part, param_path, _as_input)


def _in_document(part: dict[str, Any], param_path: str) -> FilePart | None:
    source = part.get("source")
    if not isinstance(source, dict) or source.get("type") not in ("file", "base64", "url"):
        return None

    def written(piece: Piece, first: bool) -> dict[str, Any]:
        if isinstance(piece, InlineMedia) or not first:
            return _as_block(piece)
        return {**part, "source": {"type": "text", "media_type": "text/plain", "data": piece}}

    fields = {
        "file_id": source.get("file_id"),
        "file_data": source.get("data"),
        "file_url": source.get("url"),
        "filename": "",
    }
    return _file(fields, f"{param_path}.source", written, url="url")


def _in_image_url(part: dict[str, Any], param_path: str) -> FilePart | None:
    value = part.get("image_url")
    if isinstance(value, dict):
        inner = value
        return _link(
            value.get("url"),
            f"{param_path}.image_url.url",
            lambda piece, _: {**part, "image_url": {**inner, "url": _inline(piece).url}},
        )
    return _link(value, f"{param_path}.image_url", lambda piece, _: {**part, "image_url": _inline(piece).url})


def _in_input_image(part: dict[str, Any], param_path: str) -> FilePart | None:
    def written(piece: Piece, _: bool) -> dict[str, Any]:
        rest = {name: value for name, value in part.items() if name != "file_id"}
        return {**rest, "image_url": _inline(piece).url}

    file_id, result = part.get("file_id"), part.get("image_url")
    if isinstance(file_id, str) and result is None:
        return FilePart(param_path, written, "image", None, file_id)
    return _link(result, f"{param_path}.image_url", written) if file_id is None else None


def _in_image(part: dict[str, Any], param_path: str) -> FilePart | None:
    source = part.get("source")
    if not isinstance(source, dict):
        return None

    def written(piece: Piece, _: bool) -> dict[str, Any]:
        return {**part, **_as_block(_inline(piece))}

    file_id = source.get("file_id")
    if source.get("type") == "file" and isinstance(file_id, str):
        return FilePart(f"{param_path}.source", written, "image", None, file_id)
    if source.get("type") == "url":
        return _link(source.get("url"), f"{param_path}.source.url", written)
    return None


FINDERS: dict[bytes, Callable[[dict[str, Any], str], FilePart | None]] = {
    b'"file"': _in_chat,
    b'"image_url"': _in_image_url,
    b'"input_file"': _in_input_file,
    b'"input_image"': _in_input_image,
    b'"document"': _in_document,
    b'"image"': _in_image,
}


def _inline(piece: Piece) -> InlineMedia:
    assert isinstance(piece, InlineMedia)
    return piece


def _as_chat(piece: Piece, _: bool = True) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    if piece.kind == "image":
        return {"type": "image_url", "image_url": {"url": piece.url}}
    return {"type": "input_audio", "input_audio": {"data": piece.base64, "format": piece.format}}


def _as_input(piece: Piece, _: bool = True) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"type": "input_text", "text": piece}
    return {"type": "input_image", "image_url": piece.url} if piece.kind == "image" else _as_chat(piece)


def _as_block(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    source = {"type": "base64", "media_type": piece.media_type, "data": piece.base64}
    return {"type": piece.kind, "source": source}


def _link(result: Any, param_path: str, written: Written) -> FilePart | None:
    """Return an image to be fetched, or None if the URL is not http or https."""
    if not isinstance(result, str) or not result.startswith(("http://", "https://")):
        return None
    return FilePart(param_path, written, "image", url=result)


def _file(fields: dict[str, Any], param_path: str, written: Written, url: str = "file_url") -> FilePart:
    file_id, data, link = (fields.get(name) for name in ("file_id", "file_data", "file_url"))
    filename = fields.get("filename")
    name = filename if isinstance(filename, str) else None
    if isinstance(link, str) and link and file_id is None and data is None:
        return FilePart(f"{param_path}.{url}", written, None, name, url=link)
    if isinstance(file_id, str) and data is None and not link:
        return FilePart(param_path, written, None, name, file_id)
    if not isinstance(data, str) or file_id is not None or link:
        message = f"'{param_path}' must have exactly one of file_id, file_data and file_url."
        raise BadRequest(message, param=param_path, code="invalid_value")
    return FilePart(
        param_path, written, None, "file" if name is None else name, None, _decoded(data, param_path)
    )


def _decoded(data: str, param_path: str) -> bytes:
    """Decode `data:text/plain;base64,aGk=`, or only the part after the comma."""
    encoded = data.partition(",")[2] if data.startswith("data:") else data
    try:
        return binascii.a2b_base64(encoded, strict_mode=True)
    except (binascii.Error, ValueError):
        message = f"'{param_path}.file_data' is not valid base64; send it as in data:text/plain;base64,aGk=."
        raise BadRequest(message, param=f"{param_path}.file_data", code="invalid_value") from None


def introduce(filename: str | None, text: str) -> str:
    """Format a file's text for a model, with its name."""
    return f'File "{filename}":\n\n{text}' if filename else text
