"""Streaming parser for `multipart/form-data`; it does not buffer files.

`FormReader` is fed the bytes of a body and yields events: a field begins, some of its bytes, it ends. It is
strict where other parsers guess. A form begins and ends with its boundary; every header line ends with CR LF;
a field has one name. Input that two parsers could read differently is rejected. Headers, the number of fields
and the size of fields that are not files are limited while the bytes arrive.

A field ends at `\\r\\n--BOUNDARY`. All received bytes but the last few, which may be the start of that text,
are passed on at once. Each byte is therefore examined once, and few are buffered.
"""

import re
from collections.abc import Iterator
from typing import Literal, TypeAlias
from urllib.parse import unquote_to_bytes

from msgspec import Struct

from dragoman.errors import BadRequest, BodyTooLarge, UnsupportedMediaType

MOST_FIELDS = 16
HEAD_BYTES = 4096
"""Maximum size of the headers of one field."""
HEAD_LINES = 8
VALUE_BYTES = 4096
"""Maximum size of a field that is not a file."""
FORM_BYTES = 64 * 1024
"""Maximum size of all of a form but its file."""
MEDIA = b"multipart/form-data"
_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_PARAMETER = re.compile(rb';[ \t]*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)=("(?:[^"\\]|\\.)*"|[^\s";]+)[ \t]*')
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*)", re.DOTALL)


class FieldStart(Struct, frozen=True):
    name: str
    filename: str | None
    """The file name, or None for a field that is not a file."""


class FieldEnd(Struct, frozen=True):
    """The last bytes of the field have arrived."""


FormEvent: TypeAlias = FieldStart | FieldEnd | bytes
_END = FieldEnd()
_Stage: TypeAlias = Literal["start", "head", "data", "boundary", "over"]


def boundary_of(content_type: bytes) -> bytes:
    """Return the boundary: `multipart/form-data; boundary=abc` has `abc`."""
    media, _, rest = content_type.partition(b";")
    if media.strip().lower() != MEDIA:
        raise UnsupportedMediaType("Send a form with the header 'Content-Type: multipart/form-data'.")
    boundary = _parameters(b";" + rest if rest else b"", "The Content-Type header").get("boundary")
    if boundary is None or not _BOUNDARY.fullmatch(boundary):
        raise _wrong("The Content-Type header has no valid boundary (1 to 70 characters).")
    return boundary


class FormReader:
    """Parses a form: `for event in reader.feed(data): ...`, then `reader.end()` after the last bytes."""

    def __init__(self, boundary: bytes) -> None:
        self._mark = b"\r\n--" + boundary
        self._held = b""
        self._stage: _Stage = "start"
        self._fields = 0
        self._is_file = False
        self._value_bytes = 0
        self._skips = 0
        """Buffered bytes before the field's own, which only let the search for its end match."""

    def feed(self, data: bytes) -> Iterator[FormEvent]:
        """Yield the events of these bytes; the caller must consume all of them before it feeds more."""
        self._held += data
        before: tuple[_Stage, int] | None = None
        while before != (before := (self._stage, len(self._held))):
            if self._stage == "data":
                yield from self._data()
            elif self._stage == "head":
                yield from self._head()
            elif self._stage == "start":
                self._start()
            elif self._stage == "boundary":
                self._after_boundary()
            elif self._held not in (b"", b"\r", b"\r\n"):
                raise _wrong("The form has data after its end; remove it.")

    def end(self) -> None:
        if self._stage != "over" and not (self._stage == "boundary" and self._held == b"--"):
            raise _wrong("The form is incomplete: its closing boundary is missing.")

    def _start(self) -> None:
        mark = self._mark[2:]
        if not self._held.startswith(mark[: len(self._held)]):
            raise _wrong("The form does not begin with its boundary.")
        if len(self._held) >= len(mark):
            self._stage, self._held = "boundary", self._held[len(mark) :]

    def _after_boundary(self) -> None:
        """Expect another field or the end."""
        if self._held[:2] == b"\r\n":
            self._stage, self._held = "head", self._held[2:]
            self._fields += 1
            if self._fields > MOST_FIELDS:
                message = f"The form has more than {MOST_FIELDS} fields."
                raise BadRequest(message, code="limit_exceeded")
        elif self._held[:2] == b"--":
            if len(self._held) > 2:
                self._stage, self._held = "over", self._held[2:]
        elif len(self._held) >= 2 or self._held not in (b"", b"\r", b"-"):
            raise _wrong("The form has invalid data after a boundary; expected a line break or --.")

    def _head(self) -> Iterator[FormEvent]:
        end = self._held.find(b"\r\n\r\n")
        if (len(self._held) if end < 0 else end) > HEAD_BYTES:
            message = f"A form field has headers of more than {HEAD_BYTES} bytes."
            raise BadRequest(message, code="limit_exceeded")
        if end < 0:
            return
        head, self._held = self._held[:end], self._held[end + 4 :]
        field = _read_head(head)
        self._is_file, self._value_bytes = field.filename is not None, 0
        self._stage = "data"
        # An empty field ends at once: the CR LF after its headers also precedes the boundary.
        self._held = b"\r\n" + self._held
        self._skips = 2
        yield field

    def _data(self) -> Iterator[FormEvent]:
        at = self._held.find(self._mark)
        whole = at >= 0
        if not whole:
            at = max(self._skips, len(self._held) - len(self._mark) + 1)
        if whole or at > self._skips:
            data, skipped = self._held[:at], self._skips
            self._held, self._skips = self._held[at:], 0
            if len(data) > skipped:
                yield self._counted(data[skipped:])
        if whole:
            self._stage, self._held = "boundary", self._held[len(self._mark) :]
            yield _END

    def _counted(self, data: bytes) -> bytes:
        self._value_bytes += len(data)
        if not self._is_file and self._value_bytes > VALUE_BYTES:
            message = f"A form field that is not a file is larger than {VALUE_BYTES} bytes."
            raise BodyTooLarge(message, code="limit_exceeded")
        return data


def _read_head(head: bytes) -> FieldStart:
    lines = head.split(b"\r\n")
    if len(lines) > HEAD_LINES:
        raise BadRequest(f"A form field has more than {HEAD_LINES} headers.", code="limit_exceeded")
    mapping: dict[bytes, bytes] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None or re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", line):
            raise _wrong("A form field has a malformed header.")
        if header[1].lower() in mapping:
            raise _wrong("A form field has the same header twice.")
        mapping[header[1].lower()] = header[2].strip()
    if mapping.get(b"content-transfer-encoding", b"binary").lower() not in (b"binary", b"8bit", b"7bit"):
        raise _wrong("Content-Transfer-Encoding is not supported in form fields; send the bytes unencoded.")
    kind, _, rest = mapping.get(b"content-disposition", b"").partition(b";")
    fields = _parameters(b";" + rest if rest else b"", "A form field")
    if kind.strip().lower() != b"form-data" or "name" not in fields:
        raise _wrong("A form field has no name.")
    return FieldStart(_text(fields["name"]), _filename(fields))


def _filename(fields: dict[str, bytes]) -> str | None:
    """Return the file name; RFC 5987's `filename*=utf-8''a%20b` takes precedence over the plain one."""
    extended = fields.get("filename*")
    if extended is None:
        plain = fields.get("filename")
        return None if plain is None else _text(plain)
    charset, quote, rest = extended.partition(b"'")
    if charset.lower() != b"utf-8" or not quote or b"'" not in rest:
        raise _wrong("A form field has a file name that is not UTF-8.")
    return _text(unquote_to_bytes(rest.partition(b"'")[2]))


def _parameters(text: bytes, what: str) -> dict[str, bytes]:
    """Parse `; name="a"; filename=b` into a dict of both."""
    fields: dict[str, bytes] = {}
    at = 0
    while at < len(text):
        match = _PARAMETER.match(text, at)
        if match is None:
            raise _wrong(f"{what} has malformed parameters.")
        name, value = match[1].decode("ascii").lower(), match[2]
        if name in fields:
            raise _wrong(f"{what} has the parameter {name} twice.")
        fields[name] = re.sub(rb"\\(.)", rb"\1", value[1:-1]) if value[:1] == b'"' else value
        at = match.end()
    return fields


def _text(value: bytes) -> str:
    try:
        # Browsers percent-encode the quote, CR and LF, and nothing else.
        return value.decode().replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")
    except UnicodeDecodeError:
        raise _wrong("A form field has a name that is not UTF-8.") from None


def _wrong(message: str) -> BadRequest:
    return BadRequest(message, code="invalid_form")
