"""Messages with a real model: what other servers' suites ask of this API, and the shape of each answer."""

from typing import Any

import httpx
import pytest

from tests.conformance.conftest import MODEL, RunningServer
from tests.http.test_messages import events, fold
from tests.support.http import post

TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
    },
}
CALL = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "Sunny."}
USER: dict[str, Any] = {"role": "user", "content": "What is the weather in Paris?"}
CALLED = [USER, {"role": "assistant", "content": [CALL]}]


@pytest.fixture(scope="module")
def url(llamacpp: RunningServer) -> str:
    """One runner is enough for what is asked of the server."""
    return llamacpp.url


def ask(url: str, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0, "messages": [USER], **more}
    return post(url, "/v1/messages", body)


def checked(message: dict[str, Any]) -> dict[str, Any]:
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert message["content"] and all("type" in block for block in message["content"])
    assert message["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence", "tool_use")
    used = message["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] > 0
    assert used["output_tokens"] > 0
    return message


BODIES: dict[str, dict[str, Any]] = {
    "a question": {},
    "instructions": {"system": "You are kind."},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}]},
    "a conversation": {"messages": [USER, {"role": "assistant", "content": "Mild."}, USER]},
    "a result": {"messages": [*CALLED, {"role": "user", "content": [RESULT]}]},
    "a result that is an error": {
        "messages": [*CALLED, {"role": "user", "content": [{**RESULT, "is_error": True}]}]
    },
    "a result behind a text": {
        "messages": [*CALLED, {"role": "user", "content": [{"type": "text", "text": "Here:"}, RESULT]}]
    },
    "tools": {"tools": [TOOL]},
    "stops": {"stop_sequences": ["\n", "END"]},
    "samplers": {"temperature": 0.5, "top_p": 0.9, "top_k": 40},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 50}},
    "metadata": {"metadata": {"user_id": "u1"}},
}


@pytest.mark.parametrize("name", BODIES)
def test_answers(url: str, name: str) -> None:
    reply = ask(url, **BODIES[name])
    assert reply.status_code == 200, reply.text
    checked(reply.json())


def test_a_stream_is_the_whole_answer(url: str) -> None:
    scratch = {"cache_prompt": False}
    whole = checked(ask(url, **scratch).json())
    streamed = checked(fold(events(ask(url, **scratch, stream=True))))
    assert streamed["content"] == whole["content"]
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_forced_call(url: str) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        message = checked(ask(url, tools=[TOOL], tool_choice=choice, max_tokens=60).json())
        [use] = [block for block in message["content"] if block["type"] == "tool_use"]
        assert (use["name"], set(use["input"])) == ("get_weather", {"city"})
        assert message["stop_reason"] == "tool_use"


def test_an_object(url: str) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
    }
    schema |= {"required": ["n"], "additionalProperties": False}
    wish = {"format": {"type": "json_schema", "schema": schema}}
    reply = ask(url, output_config=wish, max_tokens=40).json()
    assert '"n"' in checked(reply)["content"][0]["text"]


def test_tokens_are_counted(url: str) -> None:
    body = {"model": MODEL, "messages": [USER], "system": "You are kind."}
    counted = post(url, "/v1/messages/count_tokens", body).json()
    used = ask(url, system="You are kind.").json()["usage"]
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


@pytest.mark.parametrize("messages", [None, []])
def test_messages_are_required(url: str, messages: Any) -> None:
    reply = ask(url, messages=messages)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
