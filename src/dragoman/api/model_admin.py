"""Requests of the routes that load, unload and fetch models, and their progress events.

The names are those of llama-server and TabbyAPI; Ollama's are in `ollama`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from dragoman.api.openapi import OLLAMA_ERROR, Operation
from dragoman.api.request_decoder import IgnoredFields, RequestDecoder
from dragoman.errors import BadRequest

Name = Annotated[str, Meta(min_length=1, max_length=512)]
_encode = msgspec.json.Encoder().encode


class ChangeModelRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A request about a model; TabbyAPI sends `model_name`, and older clients `name`."""

    model: Name | None = None
    model_name: Name | None = None
    name: Name | None = None
    stream: bool | None = None
    """Whether to stream progress events until the model is loaded."""

    @property
    def meant(self) -> str | None:
        return self.model or self.model_name or self.name


class CopyModelRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    source: Name
    destination: Name


_change, _copy = RequestDecoder.for_type(ChangeModelRequest), RequestDecoder.for_type(CopyModelRequest)
OPERATIONS: Sequence[Operation] = (
    Operation("post", "/models/load", "Load a model (admin)", (ChangeModelRequest,), streams=True),
    Operation("post", "/models/unload", "Unload a model (admin)", (ChangeModelRequest,)),
    Operation("get", "/models/sse", "Stream the states of all models", streams=True),
    Operation("get", "/v1/model", "Retrieve the default model"),
    Operation("get", "/v1/model/list", "Same as /v1/models (TabbyAPI)"),
    Operation("post", "/v1/model/load", "Load a model (TabbyAPI)", (ChangeModelRequest,), streams=True),
    Operation("post", "/v1/model/unload", "Unload a model (TabbyAPI)", (ChangeModelRequest,)),
    Operation("post", "/api/copy", "Add an alias for a model", (CopyModelRequest,), error=OLLAMA_ERROR),
    Operation("delete", "/api/delete", "Delete a model from the cache", error=OLLAMA_ERROR),
)


def read_change(body: bytes, ignored: IgnoredFields | None = None) -> ChangeModelRequest:
    request: ChangeModelRequest = _change.read(body or b"{}", ignored)
    return request


def read_named(body: bytes, ignored: IgnoredFields | None = None) -> ChangeModelRequest:
    request = read_change(body, ignored)
    if request.meant is None:
        raise BadRequest("'model' is required.", param="model", code="missing_field")
    return request


def read_copy(body: bytes, ignored: IgnoredFields | None = None) -> CopyModelRequest:
    request: CopyModelRequest = _copy.read(body, ignored)
    return request


# How long a model stays loaded, in the format of Ollama's clients.


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(-?)((?:\d{1,9}(?:\.\d{1,9})?(?:ms|s|m|h))+)")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
LONGEST_S = 10.0**9


def read_keep_alive(result: Any) -> float | None:
    """Return the seconds; None means forever.

    >>> read_keep_alive("5m"), read_keep_alive("1h30m"), read_keep_alive(0), read_keep_alive(-1)
    (300.0, 5400.0, 0.0, None)
    """
    if isinstance(result, str) and (match := _DURATION.fullmatch(result)):
        seconds = sum(float(amount) * _UNITS[unit] for amount, unit in _PART.findall(match[2]))
        return None if match[1] else min(seconds, LONGEST_S)
    if isinstance(result, str) and re.fullmatch(r"-?\d{1,9}", result):
        result = int(result)
    if isinstance(result, bool) or not isinstance(result, int | float) or result != result:
        message = "'keep_alive' must be a number of seconds or a duration such as 5m; below 0 means forever."
        raise BadRequest(message, param="keep_alive", code="invalid_value")
    return None if result < 0 else min(float(result), LONGEST_S)


# Progress.


def tell_status(name: str, status: Mapping[str, object]) -> bytes:
    """Format an event about the state of a model."""
    return b"data: %s\n\n" % _encode({"model": name, "status": status})


def tell_tabby(name: str, status: Mapping[str, object]) -> bytes:
    """Format progress like TabbyAPI, which counts loaded modules; here they are percent."""
    done = 100 if status["value"] == "loaded" else int(100 * float(str(status.get("progress") or 0)))
    text = "finished" if status["value"] == "loaded" else "processing"
    fields: dict[str, object] = {"model_type": "model", "module": done, "modules": 100, "status": text}
    if "error" in status:
        fields = {"error": {"message": status["error"]}}
    return b"data: %s\n\n" % _encode(fields)


def tell_pull(name: str, done: int, total: int) -> dict[str, Any]:
    """Format a progress line of Ollama for a model that is being downloaded."""
    return {"status": f"pulling {name}", "digest": "", "total": total, "completed": done}
