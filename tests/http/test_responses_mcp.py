"""The tool loop of responses, with a real MCP server: listed, called, told to the model, approved."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from dragoman.engines.scripted import say
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.http.conftest import RunningServer, Serve
from tests.mcp.support import SERVERS, sdk_server
from tests.support.parrot import call, messages_of
from tests.support.parrot import parrot as make_parrot
from tests.support.responses import create, created, error_of, fold, kinds, numbers, streamed, texts
from tests.support.wait import becomes

ADD = call("add", a=1, b=2)
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def tools() -> Iterator[str]:
    with sdk_server("http") as url:
        yield url


@pytest.fixture(scope="module")
def parrot(tools: str) -> Iterator[RunningServer]:
    engine = make_parrot()
    with background(engine, Settings(port=0, store="memory", mcp_allow=["127.0.0.1:*"])) as url:
        yield RunningServer(engine, url)


def server(url: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "mcp",
        "server_label": "sums",
        "server_url": url,
        "require_approval": "never",
        **fields,
    }


def types(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def test_a_call_is_made_and_its_result_told(parrot: RunningServer, tools: str) -> None:
    response = created(parrot.url, ADD, tools=[server(tools)])
    listed, result, _ = response["output"]
    assert types(response) == ["mcp_list_tools", "mcp_call", "message"]
    assert "add" in [tool["name"] for tool in listed["tools"]]
    assert (result["name"], result["server_label"], result["output"]) == ("add", "sums", "3")
    assert (result["status"], result["error"], json.loads(result["arguments"])) == (
        "completed",
        None,
        {"a": 1, "b": 2},
    )
    assert texts(response) == "The tool says: 3"


def test_the_events_come_in_order(parrot: RunningServer, tools: str) -> None:
    events = streamed(parrot.url, ADD, tools=[server(tools)])
    assert kinds(events)[2:13] == [
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
        "output_item.added",
    ]
    assert fold(events) == events[-1]["response"]["output"]
    assert numbers(events) == list(range(len(events)))


def test_usage_is_that_of_all_turns(
    parrot: RunningServer, tools: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "dragoman.access"):
        usage = created(parrot.url, ADD, tools=[server(tools)])["usage"]
        assert becomes(lambda: any(hasattr(record, "request") for record in caplog.records))
    one, other = parrot.engine.jobs[-2:]
    assert usage["input_tokens"] == len(one.prompt) + len(other.prompt)
    assert usage["output_tokens"] == len(ADD) + 1 + len("The tool says: 3") + 1
    [line] = [record.request for record in caplog.records if hasattr(record, "request")]
    assert line["prompt_tokens"] == usage["input_tokens"]
    assert line["completion_tokens"] == usage["output_tokens"]


def test_calls_of_one_turn_are_made_together(parrot: RunningServer, tools: str) -> None:
    answer = f"{ADD}\n{call('add', a=3, b=4)}"
    events = streamed(parrot.url, answer, tools=[server(tools)])
    response = events[-1]["response"]
    assert [item["output"] for item in response["output"] if item["type"] == "mcp_call"] == ["3", "7"]
    assert fold(events) == response["output"]


def test_a_tool_that_fails_is_told_to_the_model(parrot: RunningServer, tools: str) -> None:
    response = created(parrot.url, call("fail"), tools=[server(tools)])
    result = response["output"][1]
    assert (result["status"], result["output"]) == ("failed", None)
    assert result["error"]["type"] == "mcp_tool_execution_error"
    assert "it cannot be done" in texts(response)


def test_a_call_for_the_client_ends_the_turn(parrot: RunningServer, tools: str) -> None:
    offered = [server(tools), WEATHER]
    first = created(parrot.url, f"{ADD}\n{call('weather')}", tools=offered)
    assert types(first) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert first["output"][1]["output"] == "3"
    output = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "sunny"}
    second = created(parrot.url, [output], tools=offered, previous_response_id=first["id"])
    assert texts(second) == "The tool says: sunny"
    assert ("tool", "3") in messages_of(parrot.engine.jobs[-1])


def test_a_list_in_the_context_is_not_asked_for_again(parrot: RunningServer, tools: str) -> None:
    first = created(parrot.url, "hi", tools=[server(tools)])
    second = created(parrot.url, ADD, tools=[server(tools)], previous_response_id=first["id"])
    assert types(second) == ["mcp_call", "message"]


def test_a_list_in_the_context_may_be_narrowed(parrot: RunningServer, tools: str) -> None:
    first = created(parrot.url, "hi", tools=[server(tools)])
    narrow = server(tools, allowed_tools=["fail"])
    created(parrot.url, "on", tools=[narrow], previous_response_id=first["id"])
    offered = messages_of(parrot.engine.jobs[-1])[0][1]
    assert '"fail"' in offered
    assert '"add"' not in offered


@pytest.mark.parametrize("allowed", [["add"], {"tool_names": ["add"]}, {"read_only": True}])
def test_only_allowed_tools_are_offered(parrot: RunningServer, tools: str, allowed: Any) -> None:
    response = created(parrot.url, "hi", tools=[server(tools, allowed_tools=allowed)])
    assert [tool["name"] for tool in response["output"][0]["tools"]] == ["add"]
    assert '"fail"' not in messages_of(parrot.engine.jobs[-1])[0][1]


def test_a_required_call_is_required_once(parrot: RunningServer, tools: str) -> None:
    created(parrot.url, ADD, tools=[server(tools)], tool_choice="required")
    one, other = parrot.engine.jobs[-2:]
    assert one.constraint is not None
    assert other.constraint is None


def test_a_tool_of_a_server_can_be_chosen(parrot: RunningServer, tools: str) -> None:
    choice = {"type": "mcp", "server_label": "sums", "name": "add"}
    response = created(parrot.url, ADD, tools=[server(tools)], tool_choice=choice)
    assert "mcp_call" in types(response)
    assert parrot.engine.jobs[-2].constraint is not None


# Approval

NEEDING: list[Any] = [
    "always",
    None,
    {"always": {"tool_names": ["add"]}},
    {"never": {"tool_names": ["fail"]}},
    {"never": {"read_only": False}},
]
NOT_NEEDING: list[Any] = ["never", {"never": {"tool_names": ["add"]}}, {"never": {"read_only": True}}]


@pytest.mark.parametrize("policy", NEEDING, ids=str)
def test_a_call_that_needs_approval_is_asked_for(parrot: RunningServer, tools: str, policy: Any) -> None:
    response = created(parrot.url, ADD, tools=[server(tools, require_approval=policy)])
    assert types(response) == ["mcp_list_tools", "mcp_approval_request"]
    assert response["status"] == "completed"
    asked = response["output"][1]
    assert (asked["name"], json.loads(asked["arguments"])) == ("add", {"a": 1, "b": 2})


@pytest.mark.parametrize("policy", NOT_NEEDING, ids=str)
def test_a_call_that_needs_none_is_made(parrot: RunningServer, tools: str, policy: Any) -> None:
    response = created(parrot.url, ADD, tools=[server(tools, require_approval=policy)])
    assert types(response) == ["mcp_list_tools", "mcp_call", "message"]


def answered(
    parrot: RunningServer, tools: str, approve: bool, **fields: Any
) -> tuple[str, list[dict[str, Any]]]:
    """The id of a request, and the events of the response after its answer."""
    offered = [server(tools, require_approval="always")]
    first = created(parrot.url, ADD, tools=offered)
    id_ = first["output"][1]["id"]
    answer = {"type": "mcp_approval_response", "approval_request_id": id_, "approve": approve, **fields}
    return id_, streamed(parrot.url, [answer], tools=offered, previous_response_id=first["id"])


def test_an_approved_call_is_made(parrot: RunningServer, tools: str) -> None:
    id_, events = answered(parrot, tools, True)
    response = events[-1]["response"]
    assert types(response) == ["mcp_call", "message"]
    result = response["output"][0]
    assert (result["approval_request_id"], result["output"]) == (id_, "3")
    assert texts(response) == "The tool says: 3"
    assert fold(events) == response["output"]
    assert kinds(events)[2:8] == [
        "output_item.added",
        "mcp_call.in_progress",
        "mcp_call_arguments.delta",
        "mcp_call_arguments.done",
        "mcp_call.completed",
        "output_item.done",
    ]


def test_an_approved_call_is_made_once(parrot: RunningServer, tools: str) -> None:
    _, events = answered(parrot, tools, True)
    offered = [server(tools, require_approval="always")]
    third = created(parrot.url, "on", tools=offered, previous_response_id=events[-1]["response"]["id"])
    assert types(third) == ["message"]


def test_a_refused_call_is_told_to_the_model(parrot: RunningServer, tools: str) -> None:
    _, events = answered(parrot, tools, False, reason="too dear")
    response = events[-1]["response"]
    assert types(response) == ["message"]
    assert texts(response) == "The tool says: The user did not allow this call. Reason: too dear"


def test_an_approval_does_not_outlive_the_server_that_it_was_for(parrot: RunningServer, tools: str) -> None:
    first = created(parrot.url, ADD, tools=[server(tools, require_approval="always")])
    answer = {
        "type": "mcp_approval_response",
        "approval_request_id": first["output"][1]["id"],
        "approve": True,
    }
    others = [server(tools, allowed_tools=["fail"])]
    response = created(parrot.url, [answer], tools=others, previous_response_id=first["id"])
    assert response["output"][0]["error"]["type"] == "mcp_protocol_error"


# Bounds


def test_no_more_calls_than_allowed_are_made(serve: Serve, tools: str) -> None:
    """The model goes on to call, whether or not it is offered anything."""
    engine = make_parrot(answer=lambda job: say(ADD))
    url = serve(engine, store="memory", mcp_allow=["127.0.0.1:*"])
    response = created(url, "hi", tools=[server(tools), WEATHER], max_tool_calls=2)
    items = [item for item in response["output"] if item["type"] == "mcp_call"]
    assert [item["status"] for item in items] == ["completed", "completed", "failed"]
    assert "max_tool_calls" in items[-1]["error"]["content"][0]["text"]
    assert response["status"] == "completed"
    assert len(engine.jobs) == 3
    assert "add" not in messages_of(engine.jobs[-1])[0][1]


@pytest.mark.parametrize("room", [0, 5])
def test_the_tokens_of_all_turns_are_counted(parrot: RunningServer, tools: str, room: int) -> None:
    most = len(ADD) + 1 + room
    response = created(parrot.url, ADD, tools=[server(tools)], max_output_tokens=most)
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", most)
    assert response["output"][1]["output"] == "3"
    assert texts(response) == "The tool says: 3"[:room]


def test_a_call_that_the_length_cuts_is_not_made(parrot: RunningServer, tools: str) -> None:
    events = streamed(parrot.url, ADD, tools=[server(tools)], max_output_tokens=len(ADD) - 20)
    response = events[-1]["response"]
    assert [item.get("status") for item in response["output"]] == [None, "incomplete"]
    assert fold(events) == response["output"]


# Who is asked


def test_a_label_names_a_configured_server(serve: Serve, tmp_path: Any) -> None:

    entry = {"command": sys.executable, "args": [str(SERVERS / "tools.py"), "stdio"]}
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"mine": entry}}))
    url = serve(make_parrot(), store="memory", mcp_config=str(config))
    mine = {"type": "mcp", "server_label": "mine", "require_approval": "never"}
    assert texts(created(url, ADD, tools=[mine])) == "The tool says: 3"


def test_a_server_that_is_not_allowed_is_refused(parrot: RunningServer) -> None:
    before = len(parrot.engine.jobs)
    reply = create(parrot.url, "hi", tools=[server("https://example.com/mcp")])
    assert (reply.status_code, error_of(reply)["code"]) == (400, "mcp_server_not_allowed")
    assert len(parrot.engine.jobs) == before


def test_a_bad_request_is_refused_before_a_server_is_asked(parrot: RunningServer, tools: str) -> None:
    reply = create(parrot.url, "hi", tools=[server(tools)], model="another")
    assert (reply.status_code, error_of(reply)["param"]) == (404, "model")
