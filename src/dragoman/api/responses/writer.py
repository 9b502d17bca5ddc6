"""Writes the model's output, and the server's MCP calls, as items of a response and their events.

The stored object is the fold of these events.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from dragoman.api.content_parts import spell_shown
from dragoman.api.reply import LogprobSerializer
from dragoman.api.responses.event_encoder import (
    MESSAGE,
    SUMMARY,
    CallItem,
    ItemEventEncoder,
    OutputBytes,
    ResponseEventEncoder,
    Status,
    TextItem,
)
from dragoman.api.responses.tools import ToolRef
from dragoman.mcp import CallResult
from dragoman.turns.tool_loop import TOO_MANY, CallOutcome, McpCall
from dragoman.types import Event, FinishReason

# MCP items: lists of tools, calls run by the server, and approval requests.


GATEWAY_TIMEOUT, BAD_GATEWAY = 504, 502
_PINNED = re.compile(r"mcpr_(?P<pin>[0-9a-f]{16})_")
"""The id of an approval request has the digest of the tool's description: approval is for that description
only."""


class PendingMcpCall(Struct):
    """An MCP call, from the model's output to its result."""

    item: CallItem
    label: str
    name: str
    approval: str | None = None
    """Id of the approval request that the client approved."""

    @property
    def arguments(self) -> str:
        return "".join(self.item.texts)

    @property
    def request(self) -> McpCall:
        pin = None if self.approval is None else pin_in(self.approval)
        return McpCall(self.label, self.name, self.arguments, pin)

    def complete(self, outcome: CallOutcome) -> tuple[bytes, dict[str, Any]]:
        """Write the result or error of the call."""
        output, error = _spell_result(outcome)
        status: Status = "failed" if error else "completed"
        item = {**self.item.body(status, self.arguments), "output": output, "error": error}
        if isinstance(outcome, CallResult) and outcome.parts:
            item["content"] = [spell_shown(part) for part in outcome.parts]
        encoder = self.item.item_encoder
        return encoder.event(f"response.mcp_call.{status}") + encoder.done(item), item

    def abandoned(self) -> tuple[bytes, dict[str, Any]]:
        """Write the call as incomplete: it was not run, or its result is no longer awaited."""
        item = self.item.body("incomplete", self.arguments)
        return self.item.item_encoder.done(item), item


def server_call(
    encoder: ItemEventEncoder, label: str, name: str, approval: str | None = None
) -> PendingMcpCall:
    def body(status: Status, text: str) -> dict[str, Any]:
        return {
            "id": encoder.id,
            "type": "mcp_call",
            "status": status,
            "server_label": label,
            "name": name,
            "arguments": text,
            "output": None,
            "error": None,
            "approval_request_id": approval,
        }

    item = CallItem(encoder, "response.mcp_call_arguments", "arguments", body)
    return PendingMcpCall(item, label, name, approval)


def make_approved_call(
    encoder: ItemEventEncoder, label: str, name: str, arguments: str, approval: str
) -> tuple[bytes, PendingMcpCall]:
    """Write a call that the model made in an earlier response and the client has approved since."""
    call = server_call(encoder, label, name, approval)
    written = (
        call.item.open(),
        encoder.event("response.mcp_call.in_progress"),
        call.item.delta(arguments),
        call.item.written(),
    )
    return b"".join(written), call


def approval_request(
    encoder: ItemEventEncoder, label: str, name: str, arguments: str
) -> tuple[bytes, dict[str, Any]]:
    """Write an approval request; it is never streamed, because half of it cannot be approved."""
    item = {"id": encoder.id, "type": "mcp_approval_request", "server_label": label, "name": name}
    item["arguments"] = arguments
    return encoder.added(item) + encoder.done(item), item


def describe_listing(
    encoder: ItemEventEncoder, label: str, tools: Sequence[dict[str, Any]], error: str | None
) -> tuple[bytes, dict[str, Any]]:
    """Write the tool list of a server; a failed list is an item too; the response continues without it."""
    item: dict[str, Any] = {"id": encoder.id, "type": "mcp_list_tools", "server_label": label}
    item |= {"tools": list(tools), "error": error}
    outcome = "failed" if error else "completed"
    written = (
        encoder.added({**item, "tools": [], "error": None}),
        encoder.event("response.mcp_list_tools.in_progress"),
        encoder.event(f"response.mcp_list_tools.{outcome}"),
        encoder.done(item),
    )
    return b"".join(written), item


def _spell_result(outcome: CallOutcome) -> tuple[str | None, dict[str, Any] | None]:
    """Return the output and the error of a call."""
    if outcome is TOO_MANY:
        return None, _execution_error("The call was not made: the response has reached max_tool_calls.")
    if isinstance(outcome, CallResult):
        return (None, _execution_error(outcome.text)) if outcome.is_error else (outcome.text, None)
    if outcome.kind == "protocol":
        return None, {"type": "mcp_protocol_error", "code": outcome.code or 0, "message": outcome.message}
    code = outcome.code or (GATEWAY_TIMEOUT if outcome.kind == "timeout" else BAD_GATEWAY)
    return None, {"type": "http_error", "code": code, "message": outcome.message}


def _execution_error(text: str) -> dict[str, Any]:
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}


def prefix_of(pin: str) -> str:
    """Return the id prefix of an approval request."""
    return f"mcpr_{pin}_" if pin else "mcpr_"


def pin_in(question: str) -> str | None:
    """Return the tool digest in an approval request's id, or None if the id is not ours."""
    match = _PINNED.match(question)
    return match["pin"] if match else None


# The model's output.


class ItemOptions(Struct, frozen=True, kw_only=True):
    """How to write the items for a request."""

    new_id: Callable[[str], str]
    """Returns a new id with the given prefix."""
    summary: bool = False
    """Whether to write reasoning only as a summary, as requested."""
    seal: Callable[[str], str] | None = None
    """Seals the reasoning, if the client wants it encrypted too."""
    speller: LogprobSerializer | None = None
    """Formats log probabilities, if requested."""
    token_ids: bool = False
    """Whether events include the sampled ids: each id once, in order."""


class ResponseWriter:
    """Writes the turns of one response, one after another.

    `refs` and `needs_approval` may change between turns: tools are listed, and used up.
    """

    def __init__(self, wire: ResponseEventEncoder, manner: ItemOptions) -> None:
        self.wire = wire
        self.refs: Mapping[str, ToolRef] = {}
        self.needs_approval: Callable[[str], bool] = lambda name: False
        """Whether a call of the tool with this visible name needs approval first."""
        self.finish: FinishReason | None = None
        self.error: Exception | None = None
        self.server_calls: list[PendingMcpCall] = []
        """The calls that the server runs next."""
        self.for_client = False
        """Whether the last turn has a call or approval request for the client."""
        self._manner = manner
        self._items: list[dict[str, Any] | None] = []
        self._open: TextItem | CallItem | None = None
        self._kind = ""
        self._asked: tuple[ToolRef, list[str]] | None = None
        """A call that needs approval, with its arguments so far."""
        self._blank: list[Event] = []
        """Whitespace that may be the beginning of a message, and ids without text that came after it."""
        self._turn_from = 0
        """Index of the first item of this turn."""

    @property
    def items(self) -> list[dict[str, Any]]:
        """The finished items."""
        return [item for item in self._items if item is not None]

    def begin_turn(self) -> None:
        self.finish = self.error = None
        self.server_calls, self.for_client = [], False
        self._turn_from = len(self._items)

    def write(self, events: Sequence[Event]) -> OutputBytes:
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
        if self._blank and kind != "finish":
            return self._after_blank(event)
        match kind:
            case "text":
                return self._begin_text(event)
            case "reasoning":
                opened = self._close("completed") + self._start(self._reasoning(), kind)
                return opened + self._one(event)
            case "call_open":
                opened = self._close("completed") + self._begin_call(event)
                self._tell(event)
                return opened
            case "call_arguments":
                self._tell(event)
                if self._asked is not None:
                    self._asked[1].append(event.text)
                return b""
            case "call_close":
                self._tell(event)
                return self._close("completed")
            case "unseen":
                self._tell(event)
                return b""
        return self._end(event)

    def _tell(self, event: Event) -> None:
        if self._manner.token_ids:
            self.wire.ids += event.ids

    def _begin_text(self, event: Event) -> bytes:
        closed = self._close("completed")
        if not event.text.strip():
            # Whitespace between items is dropped, unless a message follows or the turn has nothing else.
            self._blank.append(event)
            return closed
        return closed + self._start(self._message(), "text") + self._one(event)

    def _after_blank(self, event: Event) -> bytes:
        """Add buffered whitespace to the message that follows; without one, only its ids are reported."""
        if event.kind == "unseen" or (event.kind == "text" and not event.text.strip()):
            self._blank.append(event)
            return b""
        before, self._blank = self._blank, []
        if event.kind == "text":
            opened = self._start(self._message(), "text")
            return opened + b"".join([self._one(text) for text in (*before, event)])
        for blank in before:
            self._tell(blank)
        return self._one(event)

    def _begin_call(self, event: Event) -> bytes:
        ref = self.refs.get(event.text)
        if ref is not None and ref.kind == "mcp":
            assert ref.server_label is not None
            if self.needs_approval(event.text):
                self._asked = (ref, [])
                return b""
            call = server_call(self.next_item_encoder("mcp_"), ref.server_label, ref.name)
            self.server_calls.append(call)
            opened = self._start(call.item, "call_arguments")
            return opened + call.item.item_encoder.event("response.mcp_call.in_progress")
        self.for_client = True
        return self._start(self._client_call(event, ref), "call_arguments")

    def _client_call(self, event: Event, ref: ToolRef | None) -> CallItem:
        named: dict[str, Any] = {"call_id": event.call_id, "name": ref.name if ref else event.text}
        if ref and ref.namespace:
            named["namespace"] = ref.namespace
        if ref and ref.kind == "custom":
            kind, key, prefix, about = "custom_tool_call", "input", "ctc_", "custom_tool_call_input"
        else:
            kind, key, prefix, about = "function_call", "arguments", "fc_", "function_call_arguments"
        encoder = self.next_item_encoder(prefix)

        def body(status: Status, text: str) -> dict[str, Any]:
            return {"id": encoder.id, "type": kind, "status": status, **named, key: text}

        name = named["name"] if kind == "function_call" else None
        return CallItem(encoder, f"response.{about}", key, body, name)

    def _end(self, event: Event) -> bytes:
        """End the turn; its open item is complete only if the model ended it."""
        self.finish, self.error = event.finish, event.error
        status: Status = "completed" if event.finish == "stop" else "incomplete"
        before, self._blank = self._blank, []
        if not before:
            self._tell(event)
        written = self._close(status)
        if event.error is None and len(self._items) == self._turn_from:
            # An empty answer gets an empty message: clients read the first one without checking that there is
            # one.
            written += self._start(self._message(), "text") + b"".join([self._one(blank) for blank in before])
        else:
            for blank in before:
                self._tell(blank)
        if before:
            self._tell(event)
        return written + self._close(status)

    # Items.

    def next_item_encoder(self, prefix: str) -> ItemEventEncoder:
        """Reserve the next item."""
        self._items.append(None)
        return ItemEventEncoder(self.wire, len(self._items) - 1, self._manner.new_id(prefix))

    def add_item(self, encoder: ItemEventEncoder, item: dict[str, Any]) -> None:
        self._items[encoder.index] = item

    def abandon(self) -> OutputBytes:
        """End the response; unfinished items become incomplete."""
        written = self._close("incomplete")
        for blank in self._blank:
            self._tell(blank)
        for call in self.server_calls:
            if self._items[call.item.item_encoder.index] is None:
                data, item = call.abandoned()
                self.add_item(call.item.item_encoder, item)
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
        if self.server_calls and was is self.server_calls[-1].item:
            return was.written()
        written, item = was.close(status)
        self.add_item(was.item_encoder, item)
        return written

    def _ask(self, asked: tuple[ToolRef, list[str]], status: Status) -> bytes:
        """Write an approval request; a call that was cut off gets none."""
        self._asked = None
        if status != "completed":
            return b""
        (ref, texts), encoder, self.for_client = asked, self.next_item_encoder(prefix_of(asked[0].pin)), True
        written, item = approval_request(encoder, ref.server_label or "", ref.name, "".join(texts))
        self.add_item(encoder, item)
        return written

    def _message(self) -> TextItem:
        encoder = self.next_item_encoder("msg_")

        def item(status: Status, parts: list[dict[str, Any]]) -> dict[str, Any]:
            return {
                "id": encoder.id,
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": parts,
            }

        return TextItem(encoder, MESSAGE, item)

    def _reasoning(self) -> TextItem:
        encoder, manner = self.next_item_encoder("rs_"), self._manner

        def item(status: Status, parts: list[dict[str, Any]]) -> dict[str, Any]:
            texts = [part["text"] for part in parts]
            return {
                "id": encoder.id,
                "type": "reasoning",
                "status": status,
                "summary": parts,
                "content": [] if manner.summary else [{"type": "reasoning_text", "text": t} for t in texts],
                "encrypted_content": manner.seal(texts[0]) if manner.seal and texts else None,
            }

        # There is no second model to write a summary. Many clients know only summary events, and those that
        # know both kinds would show the text twice.
        return TextItem(encoder, SUMMARY, item)
