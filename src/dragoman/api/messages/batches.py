"""Batches of messages: requests, lines and responses."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from dragoman.api.batches import LineReply, LineRequest, Outcome
from dragoman.api.openapi import Operation
from dragoman.api.request_decoder import RequestDecoder
from dragoman.errors import BadRequest, Conflict
from dragoman.limits import Limits, check_count
from dragoman.store.records import BatchLineError, StoredBatch

KIND = "anthropic"
PATH = "/v1/messages/batches"
ENDPOINT = "/v1/messages"
_encode = msgspec.json.Encoder().encode


class MessageLine(Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_-]{1,64}\Z")]
    params: dict[str, Any]
    """A request to /v1/messages, without `stream`."""


class CreateMessageBatchRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    requests: Annotated[list[MessageLine], Meta(min_length=1)]


_CREATE = RequestDecoder.for_type(CreateMessageBatchRequest)


def read_batch(body: bytes, limits: Limits) -> list[bytes]:
    """Return the lines of the requests."""
    request: CreateMessageBatchRequest = _CREATE.read(body)
    check_count(len(request.requests), limits.batch_lines, "requests", "requests of a batch")
    seen: set[str] = set()
    for number, line in enumerate(request.requests):
        param = f"requests[{number}]"
        if line.custom_id in seen:
            message = f"'{param}.custom_id' is used by another request; ids must differ."
            raise BadRequest(message, param=f"{param}.custom_id", code="invalid_value")
        seen.add(line.custom_id)
        if line.params.get("stream"):
            message = f"'{param}.params.stream' is not supported in batches; leave it out."
            raise BadRequest(message, param=f"{param}.params.stream", code="invalid_value")
    return [_encode(line) + b"\n" for line in request.requests]


# Lines.


class _ParamsLine(Struct):
    custom_id: str
    params: Raw


class _Result(Struct):
    type: str


class _ResultLine(Struct):
    result: _Result


_asking = msgspec.json.Decoder(_ParamsLine).decode
_resulting = msgspec.json.Decoder(_ResultLine).decode
_OUTCOMES: Mapping[str, Outcome] = {"succeeded": "completed", "errored": "failed"}
_UNDONE = {"cancelled": "canceled", "expired": "expired"}


class MessagesLineCodec:
    """Reads `{custom_id, params}`, writes `{custom_id, result}`; all results are in one file."""

    prefix: ClassVar[str] = "msgbatch_"
    one_file: ClassVar[bool] = True

    def check(
        self, line: bytes, endpoint: str | None, limits: Limits, check_model: Callable[[str], None]
    ) -> LineRequest | BatchLineError:
        """Parse a line; the lines were checked when the batch was created."""
        return self.read(line)

    def read(self, line: bytes) -> LineRequest:
        asked = _asking(line)
        return LineRequest(asked.custom_id, ENDPOINT, bytes(asked.params))

    def outcome(self, line: bytes) -> Outcome:
        return _OUTCOMES.get(_resulting(line).result.type, "undone")

    def write(self, id_: str, custom_id: str, reply: LineReply) -> bytes:
        body = Raw(reply.body)
        succeeded = {"type": "succeeded", "message": body}
        result = succeeded if reply.status < 400 else {"type": "errored", "error": body}
        return _encode({"custom_id": custom_id, "result": result}) + b"\n"

    def write_undone(self, id_: str, custom_id: str, why: str) -> bytes:
        return _encode({"custom_id": custom_id, "result": {"type": _UNDONE[why]}}) + b"\n"


# Responses.


_ENDS = ("completed", "cancelled", "expired")


def describe_message_batch(batch: StoredBatch) -> dict[str, Any]:
    status: Literal["in_progress", "canceling", "ended"] = "in_progress"
    ended = next(
        (batch.at[state] for state in ("completed", "cancelled", "expired") if state in batch.at), None
    )
    if ended is not None:
        status = "ended"
    elif batch.status == "cancelling":
        status = "canceling"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {
            "processing": batch.total - batch.completed - batch.failed - batch.undone,
            "succeeded": batch.completed,
            "errored": batch.failed,
            "canceled": batch.undone if batch.status == "cancelled" else 0,
            "expired": batch.undone if batch.status == "expired" else 0,
        },
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(ended),
        "cancel_initiated_at": _time(batch.at.get("cancelling")),
        "archived_at": None,
        # A path without a host, because clients reach the server under different names.
        "results_url": f"{PATH}/{batch.id}/results" if ended is not None else None,
    }


def _time(seconds: int | None) -> str | None:
    return (
        None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    )


def describe_message_page(shown: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    return {"data": shown, "has_more": has_more, "first_id": None, "last_id": None, **ends}


def describe_deleted_batch(id_: str) -> dict[str, Any]:
    return {"id": id_, "type": "message_batch_deleted"}


def not_ended(id_: str) -> Conflict:
    message = f"The batch '{id_[:128]}' has not ended; cancel it first, or wait."
    return Conflict(message, param="message_batch_id", code="invalid_state")


MESSAGE_BATCH_OPERATIONS = (
    Operation("post", PATH, "Create a batch of messages", (CreateMessageBatchRequest,)),
    Operation("get", PATH, "List message batches", query=("after_id", "before_id", "limit")),
    Operation("get", f"{PATH}/{{id}}", "Retrieve a message batch and its progress"),
    Operation("delete", f"{PATH}/{{id}}", "Delete an ended message batch"),
    Operation("post", f"{PATH}/{{id}}/cancel", "Cancel a message batch"),
    Operation("get", f"{PATH}/{{id}}/results", "Results of a message batch (JSONL)"),
)
