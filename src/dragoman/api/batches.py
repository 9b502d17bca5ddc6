"""Batches: their requests, lines and responses.

A batch is a file with one request per line. This module parses the lines and writes the result lines; each
request in a line is read by the API of its endpoint, as if it had been sent separately.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct

from dragoman.api.files import ExpiresAfter, keep_seconds
from dragoman.api.openapi import Operation
from dragoman.api.reply import OpenAIErrorSerializer
from dragoman.api.request_decoder import RequestDecoder
from dragoman.api.sampling_fields import Metadata
from dragoman.errors import BadRequest, Conflict, DragomanError, ModelNotFound, NotFound
from dragoman.limits import Limits
from dragoman.store.records import BatchLineError, StoredBatch
from dragoman.types import Usage

ENDPOINTS: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("model", "messages"),
    "/v1/completions": ("model", "prompt"),
    "/v1/embeddings": ("model", "input"),
    "/v1/responses": ("model",),
}
"""The endpoints that a line may name, with the required fields of their bodies."""
WINDOW, WINDOW_S = "24h", 24 * 3600
LONGEST_ID = 512
"""Maximum length of a `custom_id`, in characters."""
MOST_FAULTS = 100
"""Maximum number of faulty lines that the `errors` of a batch list, so that the reply stays small."""
KIND = "openai"
ERRORS = OpenAIErrorSerializer()
_encode = msgspec.json.Encoder().encode


class CreateBatchRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    input_file_id: Annotated[str, Meta(min_length=1, max_length=256)]
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    idempotency_key: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """A second request with the same key returns the existing batch."""

    @property
    def keep_s(self) -> int | None:
        return keep_seconds("batch", self.output_expires_after)


_CREATE = RequestDecoder.for_type(CreateBatchRequest)


def read_batch(body: bytes) -> CreateBatchRequest:
    request: CreateBatchRequest = _CREATE.read(body)
    if request.endpoint not in ENDPOINTS:
        message = f"Invalid value: '{request.endpoint[:128]}'. Supported values are: {', '.join(ENDPOINTS)}."
        raise BadRequest(message, param="endpoint", code="invalid_value")
    return request


class LineRequest(NamedTuple):
    """The request in a line."""

    custom_id: str
    url: str
    body: bytes


class LineReply(NamedTuple):
    """The reply to the request of a line, as a client would have received it over HTTP."""

    status: int
    request_id: str
    body: bytes
    told: Mapping[str, str] = {}
    """Response headers that say how the answer differs from the request."""


Outcome: TypeAlias = Literal["completed", "failed", "undone"]


class BatchLineCodec(Protocol):
    """How an API writes the lines of a batch."""

    prefix: ClassVar[str]
    """Prefix of batch ids."""
    one_file: ClassVar[bool]
    """Whether errors go into the same file as results, which stays in the folder of the batch."""

    def check(
        self, line: bytes, endpoint: str | None, limits: Limits, check_model: Callable[[str], None]
    ) -> LineRequest | BatchLineError:
        """Return a line's first fault, or its request; called before anything of the batch is computed."""

    def read(self, line: bytes) -> LineRequest:
        """Parse a line that passed `check`."""

    def outcome(self, line: bytes) -> Outcome:
        """Return the outcome of a result line."""

    def write(self, id_: str, custom_id: str, reply: LineReply) -> bytes: ...

    def write_undone(self, id_: str, custom_id: str, why: str) -> bytes: ...


_NOTHING = Raw(b"null")


class _Line(Struct):
    custom_id: str
    url: str
    body: Raw


class _LooseLine(Struct):
    """A line of any types, so that the error messages can be our own."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: Raw = _NOTHING


class _OutputLine(Struct):
    custom_id: str
    response: Raw = _NOTHING


class _UsageFields(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    input_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None
    output_tokens_details: dict[str, Any] | None = None


class _WithModel(Struct):
    model: str | None = None


class _WithUsage(Struct):
    usage: _UsageFields | None = None


class _WithError(Struct):
    error: dict[str, Any] | None = None


_line = msgspec.json.Decoder(_Line).decode
_loose = msgspec.json.Decoder(_LooseLine).decode
_said = msgspec.json.Decoder(_OutputLine).decode
_any_object = msgspec.json.Decoder(dict[str, Raw]).decode
_usage = msgspec.json.Decoder(_WithUsage).decode
_named = msgspec.json.Decoder(_WithModel).decode
_error = msgspec.json.Decoder(_WithError).decode
_UNDONE = {
    "expired": "This request was not executed before the completion window of the batch was over.",
    "cancelled": "This request was not executed because the batch was cancelled.",
}
_UNDONE_CODES = frozenset(f"batch_{why}" for why in _UNDONE)


class OpenAILineCodec:
    """Reads `{custom_id, method, url, body}`, writes `{id, custom_id, response, error}`."""

    prefix: ClassVar[str] = "batch_"
    one_file: ClassVar[bool] = False

    def check(
        self, line: bytes, endpoint: str | None, limits: Limits, check_model: Callable[[str], None]
    ) -> LineRequest | BatchLineError:
        return check_line(line, endpoint, limits, check_model)

    def outcome(self, line: bytes) -> Outcome:
        error = _error(line).error
        if error is None:
            return "completed"
        return "undone" if error.get("code") in _UNDONE_CODES else "failed"

    def read(self, line: bytes) -> LineRequest:
        parsed = _line(line)
        return LineRequest(parsed.custom_id, parsed.url, bytes(parsed.body))

    def write(self, id_: str, custom_id: str, reply: LineReply) -> bytes:
        response: dict[str, Any] = {"status_code": reply.status, "request_id": reply.request_id}
        response["body"] = Raw(reply.body)
        if reply.told:
            response["headers"] = reply.told
        error = None if reply.status < 400 else error_of(reply.body)
        return _encode({"id": id_, "custom_id": custom_id, "response": response, "error": error}) + b"\n"

    def write_undone(self, id_: str, custom_id: str, why: str) -> bytes:
        error = {"code": f"batch_{why}", "message": _UNDONE[why]}
        return _encode({"id": id_, "custom_id": custom_id, "response": None, "error": error}) + b"\n"


def error_of(body: bytes) -> dict[str, Any]:
    """Return the code and message of an error reply."""
    error = _error(body).error or {}
    return {"code": error.get("code") or error.get("type"), "message": error.get("message")}


def said_of(line: bytes) -> str:
    """Return the `custom_id` of a result line."""
    return _said(line).custom_id


def model_in(body: bytes) -> str | None:
    """Return the model that a request names, or None."""
    try:
        return _named(body).model
    except msgspec.DecodeError:
        return None


def usage_in(body: bytes) -> Usage:
    """Return the usage of a reply in the format of any API."""
    try:
        used = _usage(body).usage or _UsageFields()
    except msgspec.DecodeError:
        return Usage()
    read = used.prompt_tokens_details or used.input_tokens_details or {}
    written = used.completion_tokens_details or used.output_tokens_details or {}
    return Usage(
        used.prompt_tokens or used.input_tokens,
        used.completion_tokens or used.output_tokens,
        read.get("cached_tokens") or 0,
        written.get("reasoning_tokens") or 0,
    )


def usage_of_line(line: bytes) -> Usage:
    """Return the usage of a result line."""
    response = _said(line).response
    body = None if response == _NOTHING else _any_object(response).get("body")
    return Usage() if body is None else usage_in(bytes(body))


def check_line(
    line: bytes, endpoint: str | None, limits: Limits, check_model: Callable[[str], None]
) -> LineRequest | BatchLineError:
    """Return the first fault of a line, or its request; called before anything of the batch is computed.

    `endpoint` None allows a line to name any of `ENDPOINTS`.
    """
    if len(line) > limits.body_bytes:
        return BatchLineError("limit_exceeded", f"This line is larger than {limits.body_bytes} bytes.")
    try:
        fields = _loose(line)
        members = None if fields.body == _NOTHING else _any_object(fields.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _fault_of_json(line)
    for name in ("custom_id", "method", "url", "body"):
        if getattr(fields, name) in (None, _NOTHING):
            return _missing(name)
    if not isinstance(fields.custom_id, str) or not 1 <= len(fields.custom_id) <= LONGEST_ID:
        message = f"'custom_id' must be a string of 1 to {LONGEST_ID} characters."
        return BatchLineError("invalid_value", message, "custom_id")
    if fields.method != "POST":
        return BatchLineError("invalid_method", "'method' must be POST.", "method")
    if fields.url not in ENDPOINTS or (endpoint is not None and fields.url != endpoint):
        message = "The URL provided for this request does not match the batch endpoint."
        return BatchLineError("invalid_url", message, "url")
    assert members is not None
    request = LineRequest(fields.custom_id, fields.url, bytes(fields.body))
    return _fault_of_body(fields.url, members, check_model) or request


def _fault_of_json(line: bytes) -> BatchLineError:
    try:
        fields = _any_object(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return BatchLineError("invalid_json_line", "This line is not a valid JSON object.")
    param = "body" if "body" in fields else None
    return BatchLineError("invalid_value", "'body' must be an object: the request.", param)


def _fault_of_body(
    url: str, members: Mapping[str, Raw], check_model: Callable[[str], None]
) -> BatchLineError | None:
    fields = {name: bytes(value) for name, value in members.items() if bytes(value) != b"null"}
    for name in ENDPOINTS[url]:
        if name not in fields:
            message = f"{name.capitalize()} parameter is required."
            return BatchLineError("invalid_request", message, f"body.{name}")
    if fields.get("stream", b"false") != b"false":
        message = "Streaming is not supported in the Batch API."
        return BatchLineError("streaming_unsupported", message, "body.stream")
    if fields.get("background", b"false") != b"false":
        message = "A batch always runs in the background; leave out 'background'."
        return BatchLineError("unsupported_field", message, "body.background")
    try:
        check_model(msgspec.json.decode(fields["model"], type=str))
    except ModelNotFound:
        name = fields["model"].decode(errors="replace")[:128].strip('"')
        message = f"The provided model '{name}' is not supported by the Batch API."
        return BatchLineError("model_not_found", message, "body.model")
    except (msgspec.DecodeError, DragomanError):
        return BatchLineError("invalid_value", "'model' must be the name of a model.", "body.model")
    return None


def _missing(name: str) -> BatchLineError:
    return BatchLineError("missing_required_parameter", f"Missing required parameter: '{name}'.", name)


# Responses.


_STATES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def describe_batch(batch: StoredBatch) -> dict[str, Any]:
    faults = [msgspec.structs.asdict(fault) for fault in batch.faults]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": faults} if faults else None,
        "input_file_id": batch.input_file,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{state}_at": batch.at.get(state) for state in _STATES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": batch.prompt_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
            "total_tokens": batch.prompt_tokens + batch.completion_tokens,
        },
        "metadata": batch.metadata,
    }


def unknown_batch(id_: str) -> NotFound:
    return NotFound(f"No batch found with id '{id_[:128]}'.", param="batch_id", code="not_found")


def cannot_cancel(status: str) -> Conflict:
    return Conflict(f"Cannot cancel a batch with status '{status}'.", param="batch_id", code="invalid_state")


def other_batch() -> Conflict:
    message = "This idempotency key was used for another batch; send a new key."
    return Conflict(message, param="idempotency_key")


BATCH_OPERATIONS = (
    Operation("post", "/v1/batches", "Create a batch of requests", (CreateBatchRequest,)),
    Operation("get", "/v1/batches", "List batches", query=("after", "limit")),
    Operation("get", "/v1/batches/{id}", "Retrieve a batch and its progress"),
    Operation("post", "/v1/batches/{id}/cancel", "Cancel a batch"),
)
