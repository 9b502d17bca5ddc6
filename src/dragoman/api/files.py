"""Files and multipart uploads: requests and responses."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta, Struct

from dragoman.api.openapi import PAGE, Operation
from dragoman.api.reply import OpenAIErrorSerializer
from dragoman.api.request_decoder import RequestDecoder
from dragoman.api.tools import bad_param
from dragoman.errors import BadRequest
from dragoman.store.files import CONTENT, FILE, UPLOAD, UPLOAD_PART, StoredFile, StoredUpload

Purpose: TypeAlias = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
PURPOSES: tuple[str, ...] = get_args(Purpose)
BATCH_OUTPUT = "batch_output"
"""The purpose of files written by a batch; clients cannot upload one."""
BATCH_S = 30 * 24 * 3600
"""Default retention of batch files, 30 days; also the maximum of `expires_after`."""
LONGEST_NAME = 1024
MOST_PARTS = 1024
FILE_ERRORS = OpenAIErrorSerializer({FILE: "file_id", CONTENT: "file"})
UPLOAD_ERRORS = OpenAIErrorSerializer({UPLOAD: "upload_id", UPLOAD_PART: "part_ids", CONTENT: "data"})


class ExpiresAfter(Struct, kw_only=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=BATCH_S)]


class CreateUploadRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    bytes: Annotated[int, Meta(ge=1, le=2**53)]
    filename: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    mime_type: Annotated[str, Meta(max_length=256)]
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class CompleteUploadRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    part_ids: Annotated[list[str], Meta(min_length=1, max_length=MOST_PARTS)]
    md5: Annotated[str, Meta(pattern=r"\A[0-9a-fA-F]{32}\Z")] | None = None


class FileForm(Struct, kw_only=True, forbid_unknown_fields=True):
    """The form fields beside the bytes of a file."""

    purpose: Purpose
    expires_after: ExpiresAfter | None = None

    @property
    def keep_s(self) -> int | None:
        return keep_seconds(self.purpose, self.expires_after)


_CREATE = RequestDecoder.for_type(CreateUploadRequest)
_COMPLETE = RequestDecoder.for_type(CompleteUploadRequest)
_FORM = RequestDecoder.for_type(FileForm)
_any = msgspec.json.Decoder().decode


def read_upload(body: bytes) -> CreateUploadRequest:
    request: CreateUploadRequest = _CREATE.read(body)
    return request


def read_completion(body: bytes) -> CompleteUploadRequest:
    request: CompleteUploadRequest = _COMPLETE.read(body)
    return request


def read_form(values: Mapping[str, str]) -> FileForm:
    """Read form fields such as `{"purpose": "batch", "expires_after[seconds]": "3600"}`, with brackets for
    nesting."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        outer, bracket, inner = name.partition("[")
        if not bracket:
            fields[name] = value
        elif isinstance(fields.setdefault(outer, {}), dict) and inner.endswith("]"):
            fields[outer][inner[:-1]] = value
        else:
            raise bad_param(name, "is not a valid form field name; write name[inner]")
    request: FileForm = _FORM.read(msgspec.json.encode(fields))
    return request


def keep_seconds(purpose: str, expires: ExpiresAfter | None) -> int | None:
    """Return the retention in seconds, or None to keep the file until it is deleted."""
    if expires is not None:
        return expires.seconds
    return BATCH_S if purpose in ("batch", BATCH_OUTPUT) else None


def check_beginning(purpose: str, beginning: bytes, size: int) -> None:
    """Reject a batch file early if its first line is not a JSON object. All lines are checked when a batch is
    created."""
    line, end, _ = beginning.partition(b"\n")
    if purpose != "batch" or (not end and len(line) < size):
        return
    try:
        if not isinstance(_any(line), dict):
            raise ValueError
    except (ValueError, RecursionError):
        message = "Invalid file format; send a batch file as JSONL, with one object per line."
        raise BadRequest(message, param=CONTENT, code="invalid_file_format") from None


def describe_file(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def describe_upload(upload: StoredUpload) -> dict[str, Any]:
    return {
        "id": upload.id,
        "object": "upload",
        "bytes": upload.bytes,
        "created_at": upload.created_at,
        "expires_at": upload.expires_at,
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": upload.status,
        "file": None if upload.file is None else describe_file(upload.file),
    }


def describe_part(id_: str, upload: str, created_at: int) -> dict[str, Any]:
    return {"id": id_, "object": "upload.part", "created_at": created_at, "upload_id": upload}


def describe_deleted(id_: str) -> dict[str, Any]:
    return {"id": id_, "object": "file", "deleted": True}


def describe_page(shown: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    return {"object": "list", "data": shown, "first_id": None, "last_id": None, **ends, "has_more": has_more}


def _form(file: str, **others: dict[str, Any]) -> dict[str, Any]:
    binary = {"type": "string", "contentMediaType": "application/octet-stream"}
    required = [file, *(name for name in others if name == "purpose")]
    return {"type": "object", "required": required, "properties": {file: binary, **others}}


FILE_OPERATIONS = (
    Operation(
        "post",
        "/v1/files",
        "Upload a file",
        form=_form("file", purpose={"type": "string", "enum": list(PURPOSES)}),
    ),
    Operation("get", "/v1/files", "List files", query=(*PAGE, "purpose")),
    Operation("get", "/v1/files/{id}", "Retrieve the metadata of a file"),
    Operation("delete", "/v1/files/{id}", "Delete a file"),
    Operation("get", "/v1/files/{id}/content", "Download a file"),
)
UPLOAD_OPERATIONS = (
    Operation("post", "/v1/uploads", "Create an upload in parts", (CreateUploadRequest,)),
    Operation("post", "/v1/uploads/{id}/parts", "Upload a part", form=_form("data")),
    Operation(
        "post",
        "/v1/uploads/{id}/complete",
        "Complete an upload: join its parts into a file",
        (CompleteUploadRequest,),
    ),
    Operation("post", "/v1/uploads/{id}/cancel", "Cancel an upload"),
)
