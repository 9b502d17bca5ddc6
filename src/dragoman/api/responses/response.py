"""The response object, its status events, and errors of the Responses API."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Raw, Struct

from dragoman.api.reply import (
    FIELDS,
    OpenAIErrorSerializer,
    encode,
    prompt_details,
    to_dragoman_error,
    weight_field,
    writer,
)
from dragoman.api.responses.event_encoder import DONE, ResponseEventEncoder
from dragoman.api.responses.items import ItemDict
from dragoman.api.responses.request import ResponseRequest
from dragoman.errors import (
    CONVERSATION,
    LOGPROBS,
    OUTPUT,
    PROMPT,
    TOP_LOGPROBS,
    BadRequest,
    DragomanError,
    Overloaded,
)
from dragoman.turns.spec import RequestDefaults
from dragoman.types import TurnRecord, Usage

TIERS = ("flex", "scale", "priority")
"""Service tiers returned as sent, which some clients check; all are the same to this server."""


# Errors of Responses: in a reply, in a stream, and on a socket.


class ResponsesErrorSerializer(OpenAIErrorSerializer, frozen=True):
    def message(self, error: DragomanError) -> dict[str, Any]:
        """Build an error event: flat fields for one generation of SDKs, nested for the other; Codex reads the
        status."""
        fields = self.body(error)
        flat = {key: value for key, value in fields["error"].items() if key != "type"}
        return {"type": "error", "sequence_number": 0, "status": error.status, **flat, **fields}

    def event(self, error: Exception) -> bytes:
        return b"event: error\ndata: " + encode(self.message(to_dragoman_error(error))) + b"\n\n"


ERRORS = ResponsesErrorSerializer(
    {
        **FIELDS,
        CONVERSATION: "input",
        PROMPT: "input",
        OUTPUT: "text.format",
        LOGPROBS: "include",
        TOP_LOGPROBS: "top_logprobs",
    }
)


# The object itself.


Life: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(Struct):
    """A response: its fields from the request, and its result."""

    fields: dict[str, Any]
    """The fields that the request determines, in the object's order and with defaults."""
    status: Life = "in_progress"
    completed_at: int | None = None
    error: dict[str, Any] | None = None
    incomplete: str | None = None
    output: list[dict[str, Any]] = []
    usage: Usage | None = None
    turns: list[TurnRecord] | None = None
    """The token ids of the model's turns, if the client requested them."""
    weight_version: str | None = None

    @property
    def id(self) -> str:
        return str(self.fields["id"])

    @property
    def weight(self) -> int:
        """Approximate size of the fields from the request, in bytes."""
        return sum(memoryview(result).nbytes for result in self.fields.values() if isinstance(result, Raw))

    def body(self) -> dict[str, Any]:
        return {
            **self.fields,
            "status": self.status,
            "completed_at": self.completed_at,
            "error": self.error,
            "incomplete_details": {"reason": self.incomplete} if self.incomplete else None,
            "output": self.output,
            **({"output_text": _text(self.output)} if self.output else {}),
            "usage": usage(self.usage) if self.usage else None,
            **({} if self.turns is None else {"turns": [_ids(turn) for turn in self.turns]}),
            **weight_field(self.weight_version),
        }

    def event(self, wire: ResponseEventEncoder, kind: str) -> bytes:
        return wire.event(f"response.{kind}", {"response": self.body()})

    def opening(self, wire: ResponseEventEncoder) -> bytes:
        """Write the first two events: created, then queued or in progress."""
        queued = self.status == "queued"
        return self.event(wire, "created") + self.event(wire, "queued" if queued else "in_progress")

    def ending(self, wire: ResponseEventEncoder) -> bytes:
        # There is no event for a cancelled response: its stream ends like that of an incomplete one.
        name = "incomplete" if self.status == "cancelled" else self.status
        return self.event(wire, name) + DONE


def describe_response(
    request: ResponseRequest,
    defaults: RequestDefaults,
    *,
    id_: str,
    created_at: int,
    model: str,
    store: bool,
    size: int = 0,
) -> ResponseObject:
    """Build the object, with all fields, null if unset. `size` is that of the request.

    Fields that may be large are encoded once, because each status event contains them.
    """
    write = writer(size)
    fields = {
        "id": id_,
        "object": "response",
        "created_at": created_at,
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": Raw(write(request.instructions)),
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "conversation": {"id": request.conversation_id} if request.conversation_id else None,
        "metadata": request.metadata or {},
        "tool_choice": Raw(write(request.tool_choice if request.tool_choice is not None else "auto")),
        "tools": Raw(write(request.echoed_tools)),
        "temperature": _or(defaults.value("temperature", request.temperature), 1.0),
        "top_p": _or(defaults.value("top_p", request.top_p), 1.0),
        "presence_penalty": defaults.value("presence_penalty", request.presence_penalty) or 0.0,
        "frequency_penalty": defaults.value("frequency_penalty", request.frequency_penalty) or 0.0,
        "top_logprobs": request.top_logprobs or 0,
        "truncation": request.truncation or "disabled",
        "text": Raw(write(request.echoed_text)),
        "reasoning": request.echoed_reasoning,
        "usage": None,
        "max_output_tokens": defaults.max_total_tokens(request.max_output_tokens),
        "max_tool_calls": request.max_tool_calls,
        "store": store,
        "background": bool(request.background),
        "service_tier": request.service_tier if request.service_tier in TIERS else "default",
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "user": request.user,
    }
    return ResponseObject(fields)


def _text(output: Sequence[ItemDict]) -> str:
    """Join the text of all messages, as OpenAI's SDKs do from the output, for clients without an SDK."""
    parts = (part for item in output if item["type"] == "message" for part in item["content"])
    return "".join(part["text"] for part in parts if part["type"] == "output_text")


def _ids(turn: TurnRecord) -> dict[str, Any]:
    return {"prompt_token_ids": turn.prompt, "token_ids": turn.ids, "logprobs": turn.logprobs}


def usage(counted: Usage) -> dict[str, Any]:
    return {
        "input_tokens": counted.prompt_tokens,
        "input_tokens_details": {**prompt_details(counted), "cache_write_tokens": 0},
        "output_tokens": counted.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counted.reasoning_tokens},
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
    }


def compaction_body(id_: str, created_at: int, output: list[ItemDict], used: Usage) -> dict[str, Any]:
    return {
        "id": id_,
        "object": "response.compaction",
        "created_at": created_at,
        "output": output,
        "usage": usage(used),
    }


def failure(error: Exception) -> dict[str, Any]:
    """Return the error of a failed response. Codes that clients act on are kept; others are mapped to the
    SDK's."""
    if not isinstance(error, DragomanError):
        return {"code": "server_error", "message": "The server failed; see its log."}
    message = ERRORS.body(error)["error"]["message"]
    if error.code == "context_length_exceeded":
        return {"code": error.code, "message": message}
    kinds = {BadRequest: "invalid_prompt", Overloaded: "rate_limit_exceeded"}
    code = next((code for kind, code in kinds.items() if isinstance(error, kind)), "server_error")
    return {"code": code, "message": message}


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
