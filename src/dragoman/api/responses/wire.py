"""Events of a response as bytes: numbered without a gap, each as one server-sent event with its name."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias
from uuid import uuid4

from msgspec import Raw

from dragoman.api.sse import DONE, encode

__all__ = ["DONE", "END", "HOLE", "Fragment", "Wire", "Written", "unwrapped"]

END = b"\n\n"
HOLE = Raw(b"\x00")
"""Stands in an event for something large; no JSON has such a byte."""
Written: TypeAlias = bytes | list[bytes]
"""Events; or their pieces, where some are large and in several events: they are passed on as they are."""

TELL_IDS = frozenset(
    {
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    }
)
"""Events that are no fragments, and tell ids which no fragment has told."""


class Wire:
    """Numbers the events of one response."""

    def __init__(self, *, obfuscates: bool = False) -> None:
        self.number = 0
        """Of the next event."""
        self.ids: list[int] = []
        """Sampled ids that no event has told yet, where the client wants them."""
        self.obfuscates = obfuscates
        """Whether fragments are padded, so that their sizes tell an eavesdropper less."""
        self.large: list[bytes] = []
        """What belongs into the holes of the events that were written last."""

    def event(self, kind: str, fields: dict[str, Any]) -> bytes:
        if self.ids and kind in TELL_IDS:
            fields = {**fields, "token_ids": self.ids}
            self.ids = []
        payload = encode({"type": kind, "sequence_number": self.number, **fields})
        self.number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), payload)

    def filled(self, events: bytes) -> Written:
        """Events with what belongs into their holes."""
        if not self.large:
            return events
        large, self.large = self.large, []
        around = events.split(bytes(HOLE))
        return [piece for pair in zip(around, (*large, b""), strict=True) for piece in pair if piece]

    def fragment(self, kind: str, fields: dict[str, Any]) -> "Fragment":
        return Fragment(self, kind, fields)


class Fragment:
    """One kind of delta of one item: what stays the same is encoded once."""

    def __init__(self, wire: Wire, kind: str, fields: dict[str, Any]) -> None:
        self._wire = wire
        self._kind = kind
        self._fields = fields
        name = kind.encode()
        self._start = b'event: %b\ndata: {"type":"%b","sequence_number":' % (name, name)
        self._middle = b"," + encode(fields)[1:-1] + b',"delta":'
        self._plain = not wire.obfuscates

    def write(self, text: str, beside: bytes = b"") -> bytes:
        """The event of a piece of text. `beside` are further fields, already encoded: `,"logprobs":[]`."""
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
    """The pieces, those of one event with those that were before it in the same piece."""
    gathered: list[bytes] = []
    for piece in pieces:
        gathered.append(piece)
        if piece.endswith(END):
            yield gathered
            gathered = []


def unwrapped(events: bytes) -> list[bytes]:
    """The payloads of server-sent events, without their frames; the end mark is none."""
    payloads = (block.partition(b"data: ")[2] for block in events.split(b"\n\n") if block)
    return [payload for payload in payloads if payload.startswith(b"{")]
