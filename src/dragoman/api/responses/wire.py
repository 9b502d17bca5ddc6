"""Events of a response as bytes: numbered without a gap, each as one server-sent event with its name."""

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from msgspec import Raw

from dragoman.api.sse import DONE, encode
from dragoman.turns.outlet import Written

__all__ = ["DATA", "DONE", "END", "HOLE", "Fragment", "Wire", "Written", "unwrapped"]

DATA, END = b"data: ", b"\n\n"
HOLE = Raw(b"\x00")
"""Stands in an event for something large; no JSON has such a byte."""

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
        # Joined, which lets other threads go on where it is much.
        return b"".join([b"event: ", kind.encode(), b"\n", DATA, payload, END])

    def filled(self, events: bytes) -> Written:
        """Events with what belongs into their holes."""
        if not self.large:
            return events
        large, self.large = self.large, []
        pieces: list[bytes] = []
        for around, filling in zip(events.split(bytes(HOLE)), (*large, b""), strict=True):
            # A piece ends where an event does, or before something large.
            end = around.rfind(END) + len(END) if END in around else 0
            pieces += around[:end], around[end:], filling
        return [piece for piece in pieces if piece]

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
    """The three pieces of each event that has so many, and between them the others, which are whole."""
    gathered: list[bytes] = []
    for piece in pieces:
        gathered.append(piece)
        if piece.endswith(END):
            yield gathered
            gathered = []


def unwrapped(events: bytes) -> list[bytes]:
    """The payloads of server-sent events, without their frames; the end mark is none."""
    found, at = [], 0
    while (end := events.find(END, at)) >= 0:
        begin = events.find(DATA, at, end) + len(DATA)
        if events.startswith(b"{", begin):
            found.append(events[begin:end])
        at = end + len(END)
    return found
