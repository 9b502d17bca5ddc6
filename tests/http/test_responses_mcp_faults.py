"""MCP servers that hang, die, talk nonsense or are not there: each is an item, and the response goes on."""

import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman.engines.scripted import ScriptedEngine
from tests.http.conftest import Serve
from tests.mcp.support import SERVERS, RawServer, raw_server
from tests.support.parrot import call, messages_of, parrot
from tests.support.responses import PATH, created, fold, get, kinds, numbers, payloads, streamed, texts, user
from tests.support.wait import becomes

SAY = call("say")


@pytest.fixture
def raw() -> Iterator[RawServer]:
    with raw_server() as server:
        yield server


@pytest.fixture
def engine() -> ScriptedEngine:
    return parrot()


def patient(serve: Serve, engine: ScriptedEngine, **settings: Any) -> str:
    return serve(engine, store="memory", mcp_allow=["127.0.0.1:*"], **settings)


def server(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "mcp", "server_label": "raw", "server_url": url, "require_approval": "never", **fields}


def garbage(handler: Any, number: int) -> None:
    handler.reply(200, b'{"jsonrpc": garbage')


def hang_up(handler: Any, number: int) -> None:
    handler.close_connection = True


def hang(handler: Any, number: int) -> None:
    handler.raw.released.wait()
    handler.text(number, "at last")


def refusal(handler: Any, number: int) -> None:
    handler.reply(503, b"secret page", "text/plain")


def error(handler: Any, number: int) -> None:
    handler.rpc_error(200, number, -32099, "not today")


FAULTS: dict[str, tuple[Callable[[Any, int], None], str]] = {
    "garbage": (garbage, "mcp_protocol_error"),
    "hangs up": (hang_up, "http_error"),
    "refuses": (refusal, "http_error"),
    "says no": (error, "mcp_protocol_error"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_call_that_goes_wrong_is_an_item_with_its_error(
    serve: Serve, engine: ScriptedEngine, raw: RawServer, fault: str
) -> None:
    raw.on_call["say"], kind = FAULTS[fault]
    events = streamed(patient(serve, engine), SAY, tools=[server(raw.url)])
    response = events[-1]["response"]
    _, result, message = response["output"]
    assert (result["status"], result["output"], result["error"]["type"]) == ("failed", None, kind)
    assert (response["status"], message["type"]) == ("completed", "message")
    assert "mcp_call.failed" in kinds(events)
    assert fold(events) == response["output"]
    # The model was told what went wrong, and nothing that a server says in confidence.
    assert result["error"]["message"] in texts(response)
    assert "secret page" not in texts(response)


def test_a_call_that_hangs_ends_in_time(serve: Serve, engine: ScriptedEngine, raw: RawServer) -> None:
    raw.on_call["say"] = hang
    url = patient(serve, engine, mcp_timeout=0.2)
    # Listed already, so that only the call has so little time.
    response = created(url, [listed("say"), user(SAY)], tools=[server(raw.url)])
    result = response["output"][0]
    assert (result["error"]["type"], result["error"]["code"]) == ("http_error", 504)
    assert response["status"] == "completed"


def listed(*names: str) -> dict[str, Any]:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in names]
    return {"type": "mcp_list_tools", "server_label": "raw", "tools": tools}


@contextmanager
def during_a_call(url: str, raw: RawServer) -> Iterator[tuple[bytes, Iterator[bytes]]]:
    """What a stream has said when a call is under way, and what it goes on to say."""
    raw.on_call["say"] = hang
    body = {"input": SAY, "tools": [server(raw.url)], "stream": True}
    with httpx.stream("POST", url + PATH, json=body, timeout=30) as reply:
        parts = reply.iter_raw()
        seen = b""
        while b"mcp_call_arguments.done" not in seen:
            seen += next(parts)
        yield seen, parts


def test_a_call_that_takes_long_keeps_the_stream_alive(
    serve: Serve, engine: ScriptedEngine, raw: RawServer
) -> None:
    url = patient(serve, engine, keep_alive=0.02)
    with during_a_call(url, raw) as (seen, parts):
        while b"event: response.in_progress" not in seen.partition(b"mcp_call_arguments.done")[2]:
            seen += next(parts)
        raw.released.set()
        seen += b"".join(parts)
    events = payloads(seen)
    assert numbers(events) == list(range(len(events)))
    assert fold(events) == events[-1]["response"]["output"]


def test_a_client_that_leaves_during_a_call_ends_it(
    serve: Serve, engine: ScriptedEngine, raw: RawServer
) -> None:
    url = patient(serve, engine)
    with during_a_call(url, raw) as (seen, _):
        id_ = payloads(seen)[0]["response"]["id"]
    assert becomes(lambda: get(url, id_).status_code == 200)
    response = get(url, id_).json()
    assert (response["status"], response["output"][1]["status"]) == ("cancelled", "incomplete")


def test_arguments_that_are_no_object_are_told_to_the_model(
    serve: Serve, engine: ScriptedEngine, raw: RawServer
) -> None:
    answer = '<tool_call>\n{"name": "say", "arguments": [1]}\n</tool_call>'
    response = created(patient(serve, engine), answer, tools=[server(raw.url)])
    assert "tools/call" not in raw.asked
    assert response["status"] == "completed"


def test_a_server_that_is_not_there_is_a_list_with_an_error(serve: Serve, engine: ScriptedEngine) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/mcp"
        events = streamed(patient(serve, engine), "Hello", tools=[server(url)])
    response = events[-1]["response"]
    listed = response["output"][0]
    assert (listed["type"], listed["tools"]) == ("mcp_list_tools", [])
    assert "could not be reached" in listed["error"]
    assert kinds(events)[2:6] == [
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.failed",
        "output_item.done",
    ]
    assert texts(response) == "Hello"


def test_a_list_that_failed_is_asked_for_again(serve: Serve, engine: ScriptedEngine, raw: RawServer) -> None:
    url = patient(serve, engine)
    raw.refuses_all = 503
    first = created(url, "hi", tools=[server(raw.url)])
    assert first["output"][0]["error"]
    raw.refuses_all = None
    second = created(url, SAY, tools=[server(raw.url)], previous_response_id=first["id"])
    assert [item["type"] for item in second["output"]] == ["mcp_list_tools", "mcp_call", "message"]


def test_a_list_is_asked_for_once_in_a_chain(serve: Serve, engine: ScriptedEngine, raw: RawServer) -> None:
    url = patient(serve, engine)
    first = created(url, "hi", tools=[server(raw.url)])
    created(url, SAY, tools=[server(raw.url)], previous_response_id=first["id"])
    assert raw.asked.count("tools/list") == 1


def test_a_process_that_dies_is_an_error_of_one_call(
    serve: Serve, engine: ScriptedEngine, tmp_path: Path
) -> None:
    entry = {"command": sys.executable, "args": [str(SERVERS / "raw.py")]}
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"raw": entry}}))
    url = patient(serve, engine, mcp_config=str(config))
    mine = {"type": "mcp", "server_label": "raw", "require_approval": "never"}
    response = created(url, [listed("die", "say"), user(call("die"))], tools=[mine])
    assert [item["type"] for item in response["output"]] == ["mcp_call", "message"]
    assert response["output"][0]["error"]["type"] == "http_error"
    assert "say {}" in texts(created(url, SAY, tools=[mine]))


def test_keys_are_sent_to_the_server_they_are_for_and_shown_to_nobody(
    serve: Serve, engine: ScriptedEngine, raw: RawServer
) -> None:
    url = patient(serve, engine, api_key=["ours"])
    own = server(raw.url, authorization="theirs-secret", headers={"x-own": "value-secret"})
    response = created(url, SAY, tools=[own], key="ours")
    assert {headers.get("authorization") for headers in raw.headers} == {"Bearer theirs-secret"}
    assert {headers.get("x-own") for headers in raw.headers} == {"value-secret"}
    assert "secret" not in json.dumps(response)
    assert all("secret" not in text for _, text in messages_of(engine.jobs[-1]))
