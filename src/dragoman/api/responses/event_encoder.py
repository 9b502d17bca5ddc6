"""The items of an answer while they are written, and their events as bytes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias
from uuid import uuid4

from msgspec import Raw, Struct

from dragoman.api.reply import DONE, encode
from dragoman.turns.tool_loop import OutputBytes

# Events: numbered without gaps, each a server-sent event with its name.


__all__ = [
    "DATA",
    "DONE",
    "END",
    "HOLE",
    "DeltaEncoder",
    "OutputBytes",
    "ResponseEventEncoder",
    "unwrap_event",
]

DATA, END = b"data: ", b"\n\n"
HOLE = Raw(b"\x00")
"""Placeholder in an event for large data; JSON never contains this byte."""

TELL_IDS = frozenset(
    {
        "response.output_item.added",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    }
)
"""Events that are not fragments, and that also report token ids which no fragment before them has reported.
"""


class ResponseEventEncoder:
    """Writes and numbers the events of one response."""

    def __init__(self, *, obfuscates: bool = False) -> None:
        self.number = 0
        """Number of the next event."""
        self.ids: list[int] = []
        """Sampled ids that no event has reported yet, if the client requested ids."""
        self.obfuscates = obfuscates
        """Whether to pad fragments, so that their sizes reveal less to an eavesdropper."""
        self.large: list[bytes] = []
        """The data for the placeholders of the events written last."""

    def event(self, kind: str, fields: dict[str, Any]) -> bytes:
        if self.ids and kind in TELL_IDS:
            fields = {**fields, "token_ids": self.ids}
            self.ids = []
        payload = encode({"type": kind, "sequence_number": self.number, **fields})
        self.number += 1
        # `join` releases the GIL while it copies large data.
        return b"".join([b"event: ", kind.encode(), b"\n", DATA, payload, END])

    def filled(self, events: bytes) -> OutputBytes:
        """Return the events with the data for their placeholders."""
        if not self.large:
            return events
        large, self.large = self.large, []
        pieces: list[bytes] = []
        for around, filling in zip(events.split(bytes(HOLE)), (*large, b""), strict=True):
            # A chunk ends at the end of an event, or before large data.
            end = around.rfind(END) + len(END) if END in around else 0
            pieces += around[:end], around[end:], filling
        return [piece for piece in pieces if piece]

    def delta_encoder(self, kind: str, fields: dict[str, Any]) -> "DeltaEncoder":
        return DeltaEncoder(self, kind, fields)


class DeltaEncoder:
    """One kind of delta of one item: the unchanging fields are encoded once."""

    def __init__(self, wire: ResponseEventEncoder, kind: str, fields: dict[str, Any]) -> None:
        self._wire = wire
        self._kind = kind
        self._fields = fields
        name = kind.encode()
        self._start = b'event: %b\ndata: {"type":"%b","sequence_number":' % (name, name)
        self._middle = b"," + encode(fields)[1:-1] + b',"delta":'
        self._plain = not wire.obfuscates

    def write(self, text: str, beside: bytes = b"") -> bytes:
        """Write the event of a text fragment; `beside` has more fields, already encoded: `,"logprobs":[]`."""
        wire = self._wire
        number = wire.number
        wire.number = number + 1
        if wire.ids:
            beside += b',"token_ids":' + encode(wire.ids)
            wire.ids = []
        if not self._plain:
            beside += b',"obfuscation":"%b"' % uuid4().hex[: 16 - len(text) % 16].encode()
        return b"%b%d%b%b%b}\n\n" % (self._start, number, self._middle, encode(text), beside)


def one_by_one(pieces: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Group the chunks by event: an event with large data has three, others are complete in one."""
    gathered: list[bytes] = []
    for piece in pieces:
        gathered.append(piece)
        if piece.endswith(END):
            yield gathered
            gathered = []


def unwrap_event(events: bytes) -> list[bytes]:
    """Return the payloads of server-sent events, without the end marker."""
    chunks, at = [], 0
    while (end := events.find(END, at)) >= 0:
        begin = events.find(DATA, at, end) + len(DATA)
        if events.startswith(b"{", begin):
            chunks.append(events[begin:end])
        at = end + len(END)
    return chunks


# Items: each writes its events and returns its final form.


Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]
Logprobs: TypeAlias = Sequence[Raw]
NO_LOGPROBS = Raw(b"[]")


class ItemEventEncoder(Struct, frozen=True):
    """The position of an item in its response."""

    wire: ResponseEventEncoder
    index: int
    id: str

    def added(self, item: dict[str, Any]) -> bytes:
        return self.wire.event("response.output_item.added", {"output_index": self.index, "item": item})

    def done(self, item: dict[str, Any]) -> bytes:
        return self.wire.event("response.output_item.done", {"output_index": self.index, "item": item})

    def event(self, kind: str, **fields: Any) -> bytes:
        return self.wire.event(kind, {"item_id": self.id, "output_index": self.index, **fields})


class TextItemFormat(Struct, frozen=True):
    """The event and field names of a text item."""

    part_event: str
    """Prefix of part events: `response.content_part`, with `.added` and `.done`."""
    text_event: str
    """Prefix of text events: `response.output_text`, with `.delta` and `.done`."""
    part: str
    """Type of the part with the text."""
    index: str = "content_index"
    annotated: bool = False
    """Whether the part has annotations and log probabilities."""

    def body(self, text: str, logprobs: Raw = NO_LOGPROBS) -> dict[str, Any]:
        beside = {"annotations": [], "logprobs": logprobs} if self.annotated else {}
        return {"type": self.part, "text": text, **beside}


MESSAGE = TextItemFormat("response.content_part", "response.output_text", "output_text", annotated=True)
SUMMARY = TextItemFormat(
    "response.reasoning_summary_part", "response.reasoning_summary_text", "summary_text", "summary_index"
)


class TextItem:
    """A message or reasoning item; `item(status, parts)` builds the full item."""

    def __init__(
        self,
        encoder: ItemEventEncoder,
        kind: TextItemFormat,
        item: Callable[[Status, list[dict[str, Any]]], dict[str, Any]],
    ) -> None:
        self.item_encoder = encoder
        self._kind = kind
        self._item = item
        self._texts: list[str] = []
        self._logprobs: list[bytes] = []
        fields = {"item_id": encoder.id, "output_index": encoder.index, kind.index: 0}
        self._fragment = encoder.wire.delta_encoder(f"{kind.text_event}.delta", fields)
        self._nothing = b',"logprobs":[]' if kind.annotated else b""

    def open(self) -> bytes:
        kind = self._kind
        return self.item_encoder.added(self._item("in_progress", [])) + self.item_encoder.event(
            f"{kind.part_event}.added", **{kind.index: 0, "part": kind.body("")}
        )

    def delta(self, text: str, logprobs: Logprobs = ()) -> bytes:
        self._texts.append(text)
        if not logprobs:
            return self._fragment.write(text, self._nothing)
        data = encode(logprobs)
        self._logprobs.append(data[1:-1])
        return self._fragment.write(text, b',"logprobs":' + data)

    def close(self, status: Status) -> tuple[bytes, dict[str, Any]]:
        text = "".join(self._texts)
        if not self._logprobs:
            return self._closed(status, text, NO_LOGPROBS)
        # Three events contain the log probabilities, which may be 30 MB: they get placeholders, and share one
        # copy.
        written, _ = self._closed(status, text, HOLE)
        logprobs = b"".join([b"[", b",".join(self._logprobs), b"]"])
        self.item_encoder.wire.large += [logprobs] * written.count(bytes(HOLE))
        return written, self._item(status, [self._kind.body(text, Raw(logprobs))])

    def _closed(self, status: Status, text: str, logprobs: Raw) -> tuple[bytes, dict[str, Any]]:
        kind, part = self._kind, self._kind.body(text, logprobs)
        beside = {"logprobs": logprobs} if kind.annotated else {}
        item = self._item(status, [part])
        written = (
            self.item_encoder.event(f"{kind.text_event}.done", **{kind.index: 0, "text": text, **beside}),
            self.item_encoder.event(f"{kind.part_event}.done", **{kind.index: 0, "part": part}),
            self.item_encoder.done(item),
        )
        return b"".join(written), item


class CallItem:
    """A tool call: of a function, of a custom tool, or of a tool that the server runs.

    `body(status, text)` builds the full item. `name` is included in the event at the end of its text.
    """

    def __init__(
        self,
        encoder: ItemEventEncoder,
        event: str,
        text: str,
        body: Callable[[Status, str], dict[str, Any]],
        name: str | None = None,
    ) -> None:
        self.item_encoder = encoder
        self.body = body
        self.texts: list[str] = []
        self._event = event
        self._text = text
        self._named = {} if name is None else {"name": name}
        fields = {"item_id": encoder.id, "output_index": encoder.index}
        self._fragment = encoder.wire.delta_encoder(f"{event}.delta", fields)

    def open(self) -> bytes:
        return self.item_encoder.added(self.body("in_progress", ""))

    def delta(self, text: str, logprobs: Logprobs = ()) -> bytes:
        self.texts.append(text)
        return self._fragment.write(text)

    def written(self) -> bytes:
        """Write the event at the end of the text."""
        text = "".join(self.texts)
        return self.item_encoder.event(f"{self._event}.done", **{self._text: text, **self._named})

    def close(self, status: Status) -> tuple[bytes, dict[str, Any]]:
        item = self.body(status, "".join(self.texts))
        return self.written() + self.item_encoder.done(item), item
