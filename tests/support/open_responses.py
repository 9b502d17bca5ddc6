"""The shapes of the Open Responses specification, as `openresponses-types` has them."""

import json
from typing import Any

import openresponses_types as spec
from pydantic import BaseModel

EVENTS: dict[str, type[BaseModel]] = {
    next(iter(model.model_fields["type"].annotation)).value: model
    for name, model in vars(spec).items()
    if name.endswith("StreamingEvent")
}
"""Every event by its type."""
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def checked_event(data: str | bytes) -> dict[str, Any]:
    """An event of a stream, which must be one of the specification."""
    event: dict[str, Any] = json.loads(data)
    EVENTS[event["type"]].model_validate_json(data, strict=True)
    if "response" in event:
        checked_response(event["response"])
    return event


def checked_response(body: dict[str, Any]) -> dict[str, Any]:
    """A response object, which must have every field of the specification."""
    spec.ResponseResource.model_validate_json(json.dumps(body), strict=True)
    missing = set(spec.ResponseResource.model_fields) - set(body)
    assert not missing, f"fields are missing: {missing}"
    return body


def checked_compaction(body: dict[str, Any]) -> dict[str, Any]:
    spec.CompactResource.model_validate_json(json.dumps(body), strict=True)
    return body
