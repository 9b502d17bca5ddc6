"""What the model says, as items of a response and their events. The stored object is what these fold to."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from dragoman.api.logprobs import Speller
from dragoman.api.responses.output import MESSAGE, REASONING, SUMMARY, CallItem, ItemPlace, Status, TextItem
from dragoman.api.responses.server_calls import ServerCall, approval_request, prefix_of, server_call
from dragoman.api.responses.tools import Ref
from dragoman.api.responses.wire import Wire, Written
from dragoman.types import Event, FinishReason


class Manner(Struct, frozen=True, kw_only=True):
    """How the client wants its items."""

    new_id: Callable[[str], str]
    """A new id with the given prefix."""
    summary: bool = False
    """Reasoning is told as a summary: no second model is there to write another one."""
    seal: Callable[[str], str] | None = None
    """Reasoning is also given sealed."""
    speller: Speller | None = None
    """Texts come with log probabilities."""
    token_ids: bool = False
    """Events come with the ids that were sampled: each id once, in order."""


class ResponseWriter:
    """Writes the turns of one response, one after the other.

    `refs` and `needs_approval` may change between turns: tools are listed, and used up.
    """

    def __init__(self, wire: Wire, manner: Manner) -> None:
        self.wire = wire
        self.refs: Mapping[str, Ref] = {}
        self.needs_approval: Callable[[str], bool] = lambda name: False
        """Whether a call of the tool with this visible name must be approved first."""
        self.finish: FinishReason | None = None
        self.error: Exception | None = None
        self.for_server: list[ServerCall] = []
        """The calls that the server is to run now."""
        self.for_client = False
        """Whether something in the last turn is for the client to do."""
        self._manner = manner
        self._items: list[dict[str, Any] | None] = []
        self._open: TextItem | CallItem | None = None
        self._kind = ""
        self._asked: tuple[Ref, list[str]] | None = None
        """A call that must be approved, and its arguments so far."""
        self._blank: list[Event] = []
        self._turn_from = 0
        """The first item of this turn."""

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items that are finished."""
        return [item for item in self._items if item is not None]

    def begin_turn(self) -> None:
        self.finish = self.error = None
        self.for_server, self.for_client = [], False
        self._turn_from = len(self._items)

    def write(self, events: Sequence[Event]) -> Written:
        if len(events) == 1:
            return self.wire.filled(self._one(events[0]))
        return self.wire.filled(b"".join([self._one(event) for event in events]))

    def _one(self, event: Event) -> bytes:
        kind = event.kind
        if kind == self._kind and self._open is not None:
            self._tell(event)
            if event.logprobs and self._manner.speller and kind == "text":
                return self._open.delta(event.text, self._manner.speller.chat(event.logprobs))
            return self._open.delta(event.text)
        match kind:
            case "text":
                return self._begin_text(event)
            case "reasoning":
                opened = self._close("completed") + self._start(self._reasoning(), kind)
                return opened + self._one(event)
            case "call_open":
                closed = self._close("completed")
                self._tell(event)
                return closed + self._begin_call(event)
            case "call_arguments":
                self._tell(event)
                if self._asked is not None:
                    self._asked[1].append(event.text)
                return b""
            case "call_close":
                self._tell(event)
                return self._close("completed")
        self._tell(event)
        return self._end(event)

    def _tell(self, event: Event) -> None:
        if self._manner.token_ids:
            self.wire.ids += event.ids

    def _begin_text(self, event: Event) -> bytes:
        closed = self._close("completed")
        if not event.text.strip():
            # Layout between items is no message, unless a message follows or nothing else does.
            self._blank.append(event)
            return closed
        before, self._blank = self._blank, []
        opened = closed + self._start(self._message(), "text")
        return opened + b"".join([self._one(one) for one in (*before, event)])

    def _begin_call(self, event: Event) -> bytes:
        ref = self.refs.get(event.text)
        if ref is not None and ref.kind == "mcp":
            assert ref.server_label is not None
            if self.needs_approval(event.text):
                self._asked = (ref, [])
                return b""
            call = server_call(self.place("mcp_"), ref.server_label, ref.name)
            self.for_server.append(call)
            opened = self._start(call.item, "call_arguments")
            return opened + call.item.place.event("response.mcp_call.in_progress")
        self.for_client = True
        return self._start(self._client_call(event, ref), "call_arguments")

    def _client_call(self, event: Event, ref: Ref | None) -> CallItem:
        named: dict[str, Any] = {"call_id": event.call_id, "name": ref.name if ref else event.text}
        if ref and ref.namespace:
            named["namespace"] = ref.namespace
        if ref and ref.kind == "custom":
            kind, key, prefix, about = "custom_tool_call", "input", "ctc_", "custom_tool_call_input"
        else:
            kind, key, prefix, about = "function_call", "arguments", "fc_", "function_call_arguments"
        place = self.place(prefix)

        def body(status: Status, text: str) -> dict[str, Any]:
            return {"id": place.id, "type": kind, "status": status, **named, key: text}

        name = named["name"] if kind == "function_call" else None
        return CallItem(place, f"response.{about}", key, body, name)

    def _end(self, event: Event) -> bytes:
        """A turn is over. What was being written is whole only if the model ended it."""
        self.finish, self.error = event.finish, event.error
        status: Status = "completed" if event.finish == "stop" else "incomplete"
        written = self._close(status)
        before, self._blank = self._blank, []
        if event.error is None and len(self._items) == self._turn_from:
            # An answer of nothing is a message too: a client reads it without asking whether there is one.
            written += self._start(self._message(), "text") + b"".join([self._one(one) for one in before])
            written += self._close(status)
        return written

    # Items

    def place(self, prefix: str) -> ItemPlace:
        """The next item's."""
        self._items.append(None)
        return ItemPlace(self.wire, len(self._items) - 1, self._manner.new_id(prefix))

    def finished(self, place: ItemPlace, item: dict[str, Any]) -> None:
        self._items[place.index] = item

    def abandon(self) -> Written:
        """The response is at its end: whatever is not finished stays as it is."""
        written = self._close("incomplete")
        for call in self.for_server:
            if self._items[call.item.place.index] is None:
                data, item = call.abandoned()
                self.finished(call.item.place, item)
                written += data
        return self.wire.filled(written)

    def _start(self, item: TextItem | CallItem, kind: str) -> bytes:
        self._open, self._kind = item, kind
        return item.open()

    def _close(self, status: Status) -> bytes:
        if self._asked is not None:
            return self._ask(self._asked, status)
        was, self._open, self._kind = self._open, None, ""
        if was is None:
            return b""
        if self.for_server and was is self.for_server[-1].item:
            return was.written()
        written, item = was.close(status)
        self.finished(was.place, item)
        return written

    def _ask(self, asked: tuple[Ref, list[str]], status: Status) -> bytes:
        """Whether a call may be made. One that was cut short is none."""
        self._asked = None
        if status != "completed":
            return b""
        (ref, texts), place, self.for_client = asked, self.place(prefix_of(asked[0].pin)), True
        written, item = approval_request(place, ref.server_label or "", ref.name, "".join(texts))
        self.finished(place, item)
        return written

    def _message(self) -> TextItem:
        place = self.place("msg_")

        def item(status: Status, parts: list[dict[str, Any]]) -> dict[str, Any]:
            return {
                "id": place.id,
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": parts,
            }

        return TextItem(place, MESSAGE, item)

    def _reasoning(self) -> TextItem:
        place, manner = self.place("rs_"), self._manner

        def item(status: Status, parts: list[dict[str, Any]]) -> dict[str, Any]:
            body: dict[str, Any] = {"id": place.id, "type": "reasoning", "status": status}
            body |= {"summary": parts, "content": []} if manner.summary else {"summary": [], "content": parts}
            sealed = manner.seal(parts[0]["text"]) if manner.seal and parts else None
            return {**body, "encrypted_content": sealed}

        return TextItem(place, SUMMARY if manner.summary else REASONING, item)
