"""Bodies that schemathesis makes of the Open Responses specification, right ones and wrong ones.

Whatever is sent, the answer is of the specification, or an error that says what to change.
"""

import os
from collections.abc import Iterator
from typing import Any

import openresponses_types as spec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from pydantic import BaseModel
from schemathesis import Case, CheckFunction, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
)

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.tool_model import NAME, tool_model

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "10"))
"""Making one takes a while; `make torture` makes more."""
CHECKS: list[CheckFunction] = [not_a_server_error, content_type_conformance, response_schema_conformance]
TEXT = {"type": ["string", "null"]}
FAILED = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": TEXT, "param": TEXT, "code": TEXT},
        }
    },
}


def described() -> dict[str, Any]:
    """The specification's `POST /responses`, without streams, which are events and no JSON."""
    parts = parts_of(spec.CreateResponseBody) | parts_of(spec.ResponseResource)
    body = parts["CreateResponseBody"]
    del body["properties"]["stream"], body["properties"]["stream_options"]
    body["properties"]["model"] = {"enum": [NAME]}
    # Otherwise most bodies are refused for what they lack, and never reach anything else.
    body["required"] = ["input"]
    body["additionalProperties"] = False
    operation = {
        "requestBody": {"required": True, **content({"$ref": "#/components/schemas/CreateResponseBody"})},
        "responses": {
            "200": {"description": "", **content({"$ref": "#/components/schemas/ResponseResource"})},
            "default": {"description": "", **content(FAILED)},
        },
    }
    paths = {"/v1/responses": {"post": operation}}
    info = {"title": "Open Responses", "version": spec.__spec_version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": parts}}


def parts_of(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**schema.pop("$defs"), model.__name__: schema}


def content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return tool_model(lambda _: say("Hello."))


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine) -> Iterator[str]:
    with background(engine, Settings(port=0, store="memory", unknown_fields="error")) as text:
        yield text


def send_all(url: str, mode: GenerationMode, checks: list[CheckFunction]) -> None:
    operation = schemathesis.openapi.from_dict(described())["/v1/responses"]["POST"]

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def answered(case: Case[Any]) -> None:
        case.call_and_validate(base_url=url, checks=checks)

    answered()


def test_right_bodies(url: str, engine: ScriptedEngine) -> None:
    send_all(url, GenerationMode.POSITIVE, CHECKS)
    assert engine.jobs, "some are not refused"


def test_wrong_bodies_are_refused(url: str) -> None:
    send_all(url, GenerationMode.NEGATIVE, [*CHECKS, negative_data_rejection])
