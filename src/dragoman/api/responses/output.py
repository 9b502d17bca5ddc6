"""The items of an answer while they are written: each knows its events, and what it is in the end."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Raw, Struct

from dragoman.api.responses.wire import HOLE, Wire
from dragoman.api.sse import encode

Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]
Logprobs: TypeAlias = Sequence[Raw]
NO_LOGPROBS = Raw(b"[]")


class ItemPlace(Struct, frozen=True):
    """Where an item stands in its response."""

    wire: Wire
    index: int
    id: str

    def added(self, item: dict[str, Any]) -> bytes:
        return self.wire.event("response.output_item.added", {"output_index": self.index, "item": item})

    def done(self, item: dict[str, Any]) -> bytes:
        return self.wire.event("response.output_item.done", {"output_index": self.index, "item": item})

    def event(self, kind: str, **fields: Any) -> bytes:
        return self.wire.event(kind, {"item_id": self.id, "output_index": self.index, **fields})


class TextKind(Struct, frozen=True):
    """How an item that is a text is spelled."""

    part_event: str
    """`response.content_part`, which is `.added` and `.done`."""
    text_event: str
    """`response.output_text`, which has `.delta` and `.done`."""
    part: str
    """The type of the part that has the text."""
    index: str = "content_index"
    annotated: bool = False
    """Whether it has annotations and log probabilities."""

    def body(self, text: str, logprobs: Raw = NO_LOGPROBS) -> dict[str, Any]:
        beside = {"annotations": [], "logprobs": logprobs} if self.annotated else {}
        return {"type": self.part, "text": text, **beside}


MESSAGE = TextKind("response.content_part", "response.output_text", "output_text", annotated=True)
REASONING = TextKind("response.content_part", "response.reasoning_text", "reasoning_text")
SUMMARY = TextKind(
    "response.reasoning_summary_part", "response.reasoning_summary_text", "summary_text", "summary_index"
)


class TextItem:
    """A message, or reasoning. `item(status, parts)` is the whole of it."""

    def __init__(
        self, place: ItemPlace, kind: TextKind, item: Callable[[Status, list[dict[str, Any]]], dict[str, Any]]
    ) -> None:
        self.place = place
        self._kind = kind
        self._item = item
        self._texts: list[str] = []
        self._logprobs: list[bytes] = []
        fields = {"item_id": place.id, "output_index": place.index, kind.index: 0}
        self._fragment = place.wire.fragment(f"{kind.text_event}.delta", fields)
        self._nothing = b',"logprobs":[]' if kind.annotated else b""

    def open(self) -> bytes:
        kind = self._kind
        return self.place.added(self._item("in_progress", [])) + self.place.event(
            f"{kind.part_event}.added", **{kind.index: 0, "part": kind.body("")}
        )

    def delta(self, text: str, logprobs: Logprobs = ()) -> bytes:
        self._texts.append(text)
        if not logprobs:
            return self._fragment.write(text, self._nothing)
        told = encode(logprobs)
        self._logprobs.append(told[1:-1])
        return self._fragment.write(text, b',"logprobs":' + told)

    def close(self, status: Status) -> tuple[bytes, dict[str, Any]]:
        text = "".join(self._texts)
        if not self._logprobs:
            return self._closed(status, text, NO_LOGPROBS)
        # Three events have them, and they may be 30 MB: these have holes, and pass on one and the same.
        written, _ = self._closed(status, text, HOLE)
        logprobs = b"".join([b"[", b",".join(self._logprobs), b"]"])
        self.place.wire.large += [logprobs] * written.count(bytes(HOLE))
        return written, self._item(status, [self._kind.body(text, Raw(logprobs))])

    def _closed(self, status: Status, text: str, logprobs: Raw) -> tuple[bytes, dict[str, Any]]:
        kind, part = self._kind, self._kind.body(text, logprobs)
        beside = {"logprobs": logprobs} if kind.annotated else {}
        item = self._item(status, [part])
        written = (
            self.place.event(f"{kind.text_event}.done", **{kind.index: 0, "text": text, **beside}),
            self.place.event(f"{kind.part_event}.done", **{kind.index: 0, "part": part}),
            self.place.done(item),
        )
        return b"".join(written), item


class CallItem:
    """A call of a tool: of a function, of a custom tool, or of one that the server runs.

    `body(status, text)` is the whole of it. `name` is what the event at the end of its text says of it.
    """

    def __init__(
        self,
        place: ItemPlace,
        event: str,
        text: str,
        body: Callable[[Status, str], dict[str, Any]],
        name: str | None = None,
    ) -> None:
        self.place = place
        self.body = body
        self.texts: list[str] = []
        self._event = event
        self._text = text
        self._named = {} if name is None else {"name": name}
        fields = {"item_id": place.id, "output_index": place.index}
        self._fragment = place.wire.fragment(f"{event}.delta", fields)

    def open(self) -> bytes:
        return self.place.added(self.body("in_progress", ""))

    def delta(self, text: str, logprobs: Logprobs = ()) -> bytes:
        self.texts.append(text)
        return self._fragment.write(text)

    def written(self) -> bytes:
        """The model has written all of it."""
        text = "".join(self.texts)
        return self.place.event(f"{self._event}.done", **{self._text: text, **self._named})

    def close(self, status: Status) -> tuple[bytes, dict[str, Any]]:
        item = self.body(status, "".join(self.texts))
        return self.written() + self.place.done(item), item
