"""The cases of the Open Responses compliance suite, judged by the types of the specification.

The suite's case with an image is not here: text models refuse images.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from dragoman.engines.scripted import Script, say
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job
from tests.support.open_responses import ENDS, checked_compaction, checked_event, checked_response
from tests.support.tool_model import NAME, call, prompt_of, tool_model

TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
}
TALK = [
    {"type": "message", "role": "user", "content": "My name is Alice."},
    {"type": "message", "role": "assistant", "content": "Hello Alice!"},
    {"type": "message", "role": "user", "content": "What is my name?"},
]


def said(job: Job) -> Script:
    return say(call("get_weather", location="Rome") if "get_weather" in prompt_of(job) else "Hello there.")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with background(tool_model(said), Settings(port=0, store="memory")) as text:
        yield text + "/v1/responses"


@pytest.fixture
def socket(url: str) -> Iterator[Connection]:
    with connect(url.replace("http", "ws", 1)) as connection:
        yield connection


def ask(url: str, input_: object, **fields: object) -> dict[str, Any]:
    reply = httpx.post(url, json={"model": NAME, "input": input_, **fields}, timeout=120)
    assert reply.status_code == 200, reply.text
    return checked_response(reply.json())


def streamed(url: str, input_: object, **fields: object) -> list[dict[str, Any]]:
    body = {"model": NAME, "input": input_, "stream": True, **fields}
    text = httpx.post(url, json=body, timeout=120).text
    assert text.endswith("data: [DONE]\n\n")
    events = []
    for block in text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(checked_event(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def turn(socket: Connection, input_: object, **fields: object) -> dict[str, Any]:
    """The last event of a turn on a socket; all are checked."""
    socket.send(json.dumps({"type": "response.create", "model": NAME, "input": input_, **fields}))
    event: dict[str, Any] = {}
    while event.get("type") not in ENDS:
        event = checked_event(socket.recv(timeout=120))
    return event


def completed(event: dict[str, Any]) -> str:
    assert event["type"] == "response.completed", event
    assert event["response"]["output"]
    return str(event["response"]["id"])


def code(event: dict[str, Any]) -> str:
    assert event["type"] == "error", event
    return str(event["error"]["code"])


@pytest.mark.parametrize(
    "input_",
    [
        "Say hello in exactly 3 words.",
        [{"type": "message", "role": "system", "content": "You are a pirate."}, TALK[0]],
        TALK,
        [{**TALK[1], "phase": "commentary"}, TALK[2]],
    ],
    ids=["basic", "system prompt", "multi-turn", "assistant phase"],
)
def test_response(url: str, input_: object) -> None:
    reply = ask(url, input_)
    assert reply["status"] == "completed"
    assert [item["type"] for item in reply["output"]] == ["message"]


def test_streaming(url: str) -> None:
    completed(streamed(url, "Count from 1 to 5.")[-1])


def test_tool_calling(url: str) -> None:
    [item] = ask(url, "What is the weather?", tools=[TOOL])["output"]
    assert (item["type"], item["name"]) == ("function_call", "get_weather")


def test_tool_calling_streamed(url: str) -> None:
    kinds = [event["type"].removeprefix("response.") for event in streamed(url, "Weather?", tools=[TOOL])]
    call = [kind for kind in kinds if kind != "function_call_arguments.delta"]
    assert "function_call_arguments.delta" in kinds
    assert call[2:5] == ["output_item.added", "function_call_arguments.done", "output_item.done"]


def test_compaction(url: str) -> None:
    body = {"model": NAME, "prompt_cache_key": "compaction", "input": TALK}
    reply = checked_compaction(httpx.post(url + "/compact", json=body, timeout=120).json())
    assert "compaction" in [item["type"] for item in reply["output"]]


def test_compaction_without_a_model(url: str) -> None:
    assert httpx.post(url + "/compact", json={"input": TALK}, timeout=120).status_code == 400


def test_websocket_turns(socket: Connection) -> None:
    first = completed(turn(socket, "Reply with exactly: first", store=False))
    assert completed(turn(socket, "Reply with exactly: second", store=False)) != first


def test_websocket_continuation(socket: Connection) -> None:
    first = completed(turn(socket, "The code word is cobalt.", store=False))
    completed(turn(socket, "What is the code word?", store=False, previous_response_id=first))


def test_websocket_recovers_after_a_reconnect(url: str, socket: Connection) -> None:
    first = completed(turn(socket, "The code word is copper.", store=False))
    with connect(url.replace("http", "ws", 1)) as other:
        lost = turn(other, "Go on.", store=False, previous_response_id=first)
        assert code(lost) == "previous_response_not_found"
        completed(turn(other, "Start again.", store=False))


def test_websocket_unknown_previous_response(socket: Connection) -> None:
    missing = turn(socket, "Go on.", store=False, previous_response_id="resp_missing")
    assert code(missing) == "previous_response_not_found"


def test_websocket_failed_continuation_is_evicted(socket: Connection) -> None:
    first = completed(turn(socket, "The code word is ember.", store=False))
    output = {"type": "function_call_output", "call_id": "call_missing", "output": "nothing"}
    assert turn(socket, [output], store=False, previous_response_id=first)["type"] == "error"
    stale = turn(socket, "Go on.", store=False, previous_response_id=first)
    assert code(stale) == "previous_response_not_found"


def test_websocket_begins_anew_with_what_was_compacted(url: str, socket: Connection) -> None:
    body = {"model": NAME, "input": TALK}
    compacted = httpx.post(url + "/compact", json=body, timeout=120).json()["output"]
    completed(turn(socket, [*compacted, TALK[0]], store=False))
