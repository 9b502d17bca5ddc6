"""The revision without a handshake, in which a call may take several rounds."""

from typing import Any

import pytest

from dragoman.mcp import McpServerSpec, McpSession
from tests.mcp.support import NEWEST, RawServer, failure_of, with_session

MISMATCH = -32020


@pytest.fixture
def spec(raw: RawServer, raw_spec: McpServerSpec) -> McpServerSpec:
    raw.revision = NEWEST
    return raw_spec


def test_there_is_no_handshake(raw: RawServer, spec: McpServerSpec) -> None:
    assert with_session(spec, lambda session: session.call("say", {})).text == "say was called"
    assert raw.asked == ["server/discover", "tools/call"]
    assert raw.headers[-1]["mcp-protocol-version"] == NEWEST


def put_off(times: int, raw: RawServer) -> None:
    def answer(handler: Any, number: int) -> None:
        if len(raw.params) <= times:
            handler.result(
                number, {"resultType": "input_required", "requestState": f"round {len(raw.params)}"}
            )
        else:
            handler.text(number, "done")

    raw.on_call["later"] = answer


def test_a_server_that_wants_to_be_asked_again(raw: RawServer, spec: McpServerSpec) -> None:
    put_off(2, raw)
    assert with_session(spec, lambda session: session.call("later", {"a": 1})).text == "done"
    assert [params.get("requestState") for params in raw.params] == [None, "round 1", "round 2"]
    assert {params["arguments"]["a"] for params in raw.params} == {1}


def test_a_server_that_wants_to_be_asked_again_and_again(raw: RawServer, spec: McpServerSpec) -> None:
    put_off(1000, raw)
    failure = with_session(spec, lambda session: failure_of(session.call("later", {})))
    assert failure.message == "The MCP server raw postpones its answer again and again."


def test_a_server_that_asks_a_person(raw: RawServer, spec: McpServerSpec) -> None:
    question = {"method": "elicitation/create", "params": {"message": "Sure?", "requestedSchema": SCHEMA}}
    asking = {"resultType": "input_required", "inputRequests": {"sure": question}}
    raw.on_call["ask"] = lambda handler, number: handler.result(number, asking)
    failure = with_session(spec, lambda session: failure_of(session.call("ask", {})))
    assert failure.kind == "protocol"
    assert "not supported" in failure.message


SCHEMA = {"type": "object", "properties": {}}


def test_arguments_that_belong_into_headers_are_looked_up(raw: RawServer, spec: McpServerSpec) -> None:
    def strict(handler: Any, number: int) -> None:
        if raw.headers[-1].get("mcp-param-who") == "me":
            handler.text(number, "hello")
        else:
            handler.rpc_error(400, number, MISMATCH, "Header mismatch")

    raw.on_call["say"] = strict

    async def use(session: McpSession) -> None:
        assert (await session.call("say", {"who": "me"})).text == "hello"
        assert raw.asked[1:] == ["tools/call", "tools/list", "tools/call"]

    with_session(spec, use)
