"""The `openai` client has the server call tools of an MCP server, which is a process of its own."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from dragoman.engines.scripted import Script, say
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job
from tests.mcp.support import sdk_server
from tests.support.tool_model import NAME, call, prompt_of, tool_model

ASK = "What is 19 and 23?"


def said(job: Job) -> Script:
    prompt = prompt_of(job)
    if "\n42" in prompt:
        return say("It is 42.")
    return say("As you wish." if "did not allow" in prompt else call("add", a=19, b=23))


@pytest.fixture(scope="module")
def mcp() -> Iterator[str]:
    with sdk_server("http") as url:
        yield url


@pytest.fixture(scope="module")
def client(mcp: str) -> Iterator[OpenAI]:
    settings = Settings(port=0, store="memory", mcp_allow=["127.0.0.1:*"])
    with (
        background(tool_model(said, context=16384), settings) as url,
        OpenAI(
            base_url=url + "/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as open_ai,
    ):
        yield open_ai


def tool(mcp: str, approval: str) -> Any:
    return {"type": "mcp", "server_label": "sums", "server_url": mcp, "require_approval": approval}


def test_a_tool_is_listed_called_and_its_result_read(client: OpenAI, mcp: str) -> None:
    reply = client.responses.create(model=NAME, input=ASK, tools=[tool(mcp, "never")])
    assert [item.type for item in reply.output] == ["mcp_list_tools", "mcp_call", "message"]
    value = reply.output[1]
    assert value.type == "mcp_call"
    assert (json.loads(value.arguments), value.output) == ({"a": 19, "b": 23}, "42")
    assert reply.output_text == "It is 42."


def test_a_streamed_call_tells_of_every_step(client: OpenAI, mcp: str) -> None:
    events = list(client.responses.create(model=NAME, input=ASK, tools=[tool(mcp, "never")], stream=True))
    kinds = [event.type.removeprefix("response.") for event in events if ".mcp_" in event.type]
    assert [kind for kind in kinds if kind != "mcp_call_arguments.delta"] == [
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "mcp_call.in_progress",
        "mcp_call_arguments.done",
        "mcp_call.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(("approve", "answer"), [(True, "It is 42."), (False, "As you wish.")])
def test_a_call_waits_for_approval(client: OpenAI, mcp: str, approve: bool, answer: str) -> None:
    tools = [tool(mcp, "always")]
    first = client.responses.create(model=NAME, input=ASK, tools=tools)
    asked = first.output[-1]
    assert asked.type == "mcp_approval_request"
    second = client.responses.create(
        model=NAME,
        tools=tools,
        previous_response_id=first.id,
        input=[{"type": "mcp_approval_response", "approval_request_id": asked.id, "approve": approve}],
    )
    assert ("mcp_call" in [item.type for item in second.output]) == approve
    assert second.output_text == answer


def test_max_tool_calls_ends_the_loop(client: OpenAI, mcp: str) -> None:
    listed = client.responses.create(model=NAME, input=ASK, tools=[tool(mcp, "never")], max_tool_calls=1)
    assert [item.type for item in listed.output].count("mcp_call") == 1
