"""Calls that the server runs itself: MCP's lists of tools, calls and questions whether they are allowed."""

import re
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from dragoman.api.responses.output import CallItem, ItemPlace, Status
from dragoman.mcp import CallResult
from dragoman.turns.toolbox import TOO_MANY, Outcome, ServedCall

GATEWAY_TIMEOUT, BAD_GATEWAY = 504, 502
_PINNED = re.compile(r"mcpr_(?P<pin>[0-9a-f]{16})_")
"""What is approved is a call of a tool as it was described then; the id of the question keeps which one."""


class ServerCall(Struct):
    """A call of an MCP tool, on its way from what the model wrote to its result."""

    item: CallItem
    label: str
    name: str
    approval: str | None = None
    """The question to which somebody said yes."""

    @property
    def arguments(self) -> str:
        return "".join(self.item.texts)

    @property
    def asked(self) -> ServedCall:
        pin = None if self.approval is None else pin_in(self.approval)
        return ServedCall(self.label, self.name, self.arguments, pin)

    def done(self, outcome: Outcome) -> tuple[bytes, dict[str, Any]]:
        """The result, or what went wrong."""
        output, error = _spelled(outcome)
        status: Status = "failed" if error else "completed"
        item = {**self.item.body(status, self.arguments), "output": output, "error": error}
        place = self.item.place
        return place.event(f"response.mcp_call.{status}") + place.done(item), item

    def abandoned(self) -> tuple[bytes, dict[str, Any]]:
        """It was never run, or nobody waits for its result any more."""
        item = self.item.body("incomplete", self.arguments)
        return self.item.place.done(item), item


def server_call(place: ItemPlace, label: str, name: str, approval: str | None = None) -> ServerCall:
    def body(status: Status, text: str) -> dict[str, Any]:
        return {
            "id": place.id,
            "type": "mcp_call",
            "status": status,
            "server_label": label,
            "name": name,
            "arguments": text,
            "output": None,
            "error": None,
            "approval_request_id": approval,
        }

    item = CallItem(place, "response.mcp_call_arguments", "arguments", body)
    return ServerCall(item, label, name, approval)


def approved_call(
    place: ItemPlace, label: str, name: str, arguments: str, approval: str
) -> tuple[bytes, ServerCall]:
    """A call that the model wrote in an earlier response, and the client has approved since."""
    call = server_call(place, label, name, approval)
    written = (
        call.item.open(),
        place.event("response.mcp_call.in_progress"),
        call.item.delta(arguments),
        call.item.written(),
    )
    return b"".join(written), call


def approval_request(place: ItemPlace, label: str, name: str, arguments: str) -> tuple[bytes, dict[str, Any]]:
    """It comes all at once: half a question cannot be answered."""
    item = {"id": place.id, "type": "mcp_approval_request", "server_label": label, "name": name}
    item["arguments"] = arguments
    return place.added(item) + place.done(item), item


def listed(
    place: ItemPlace, label: str, tools: Sequence[dict[str, Any]], error: str | None
) -> tuple[bytes, dict[str, Any]]:
    """What a server offers; a list that failed is an item too, and the response goes on without it."""
    item: dict[str, Any] = {"id": place.id, "type": "mcp_list_tools", "server_label": label}
    item |= {"tools": list(tools), "error": error}
    outcome = "failed" if error else "completed"
    written = (
        place.added({**item, "tools": [], "error": None}),
        place.event("response.mcp_list_tools.in_progress"),
        place.event(f"response.mcp_list_tools.{outcome}"),
        place.done(item),
    )
    return b"".join(written), item


def _spelled(outcome: Outcome) -> tuple[str | None, dict[str, Any] | None]:
    """What came of a call as the output of its item, or as its error."""
    if outcome is TOO_MANY:
        return None, _execution_error("The call was not made: max_tool_calls is reached.")
    if isinstance(outcome, CallResult):
        return (None, _execution_error(outcome.text)) if outcome.is_error else (outcome.text, None)
    if outcome.kind == "protocol":
        return None, {"type": "mcp_protocol_error", "code": outcome.code or 0, "message": outcome.message}
    code = outcome.code or (GATEWAY_TIMEOUT if outcome.kind == "timeout" else BAD_GATEWAY)
    return None, {"type": "http_error", "code": code, "message": outcome.message}


def _execution_error(text: str) -> dict[str, Any]:
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}


def prefix_of(pin: str) -> str:
    """What the id of a question begins with."""
    return f"mcpr_{pin}_" if pin else "mcpr_"


def pin_in(question: str) -> str | None:
    """That of the tool which the question was about. A question that is not ours tells nothing."""
    found = _PINNED.match(question)
    return found["pin"] if found else None
