"""What is wrong with a request is said before anything is done for it: the engine never hears of it."""

from typing import Any

import httpx
import pytest

from tests.http.conftest import RunningServer
from tests.support.parrot import NAME
from tests.support.responses import PATH, create, error_of

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}
USER = {"role": "user", "content": "hi"}

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model": "another"}, "model"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["x" * 2000]}, "stop"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 1.5}, "max_output_tokens"),
    ({"max_output_tokens": True}, "max_output_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"temperature": 3}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"truncation": "some"}, "truncation"),
    ({"reasoning": {"effort": "endless"}}, "reasoning.effort"),
    ({"tools": [{"type": "nothing"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools[1]"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [{"type": "mcp", "server_label": "no"}]}, "tools"),
    ({"text": {"format": SCHEMA}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": SCHEMA}, "context_management": [{"type": "compaction"}]}, "text.format.schema"),
    ({"previous_response_id": "resp_no"}, "previous_response_id"),
    ({"previous_response_id": "resp_no", "conversation": "conv_no"}, "conversation"),
    ({"conversation": "conv_no"}, "conversation"),
    ({"background": True, "store": False}, "background"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "nothing"}]}, "input[0].type"),
    ({"input": [USER, {"role": "user"}]}, "input[1].content"),
    ({"input": [{"role": "nobody", "content": "hi"}]}, "input[0].role"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
    ({"input": [{"type": "compaction_trigger"}, USER]}, "input[0]"),
    ({"input": [{"type": "mcp_list_tools", "server_label": "l", "tools": [{}]}, USER]}, "input[0].tools"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"n": 2}, "n"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_bad_field_is_named_and_nothing_is_done(
    parrot: RunningServer, fields: dict[str, Any], param: str, stream: bool
) -> None:
    before = len(parrot.engine.jobs)
    asked = {"input": "hi", **fields}
    reply = create(parrot.url, stream=stream, **asked)
    assert 400 <= reply.status_code < 500
    assert (error_of(reply)["param"] or "").startswith(param)
    assert len(parrot.engine.jobs) == before


def test_a_summary_is_not_written_for_a_request_that_would_fail(parrot: RunningServer) -> None:
    before = len(parrot.engine.jobs)
    trigger = [USER, {"type": "compaction_trigger"}]
    reply = create(parrot.url, trigger, text={"format": SCHEMA})
    assert error_of(reply)["param"].startswith("text.format.schema")
    assert len(parrot.engine.jobs) == before


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"input": "\xff"}', b'{"input": ' + b"[" * 5000])
def test_a_body_that_is_no_request_is_a_400(parrot: RunningServer, body: bytes) -> None:
    reply = httpx.post(parrot.url + PATH, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert error_of(reply)["type"] == "invalid_request_error"


def test_null_stands_for_nothing(parrot: RunningServer) -> None:
    names = ("previous_response_id", "truncation", "user", "tools", "reasoning", "text", "metadata", "store")
    assert create(parrot.url, model=NAME, **dict.fromkeys(names)).status_code == 200


@pytest.mark.parametrize("path", ["resp_no", "resp_no/input_items", "%00", "x" * 3000])
def test_an_odd_id_is_just_not_there(parrot: RunningServer, path: str) -> None:
    assert httpx.get(f"{parrot.url}{PATH}/{path}").status_code == 404
