"""Real clients call tools. The model is a script, so that there is a call to be sure of, or made to call."""

import json
from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any

import pytest
from openai import OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import (
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
    ChatCompletionToolParam,
)

from dragoman.engines.scripted import Script, ScriptedEngine, say
from dragoman.http.server import background
from dragoman.types import Job
from tests.conformance.conftest import MODEL, RunningServer
from tests.support.tool_model import prompt_of, tool_model

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALLING = f"<think>\nLet me ask.\n</think>\n\nOne moment.\n{CALL}"
RESULT = "21 degrees"
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How warm is it in Paris?"}]
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How warm it is",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def answer(job: Job) -> Script:
    """Calls the tool, and once it has the result tells of it."""
    prompt = prompt_of(job)
    return say("It has 21 degrees." if RESULT in prompt else CALLING)


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return tool_model(answer)


@pytest.fixture(scope="module")
def base_url(engine: ScriptedEngine) -> Iterator[str]:
    with background(engine) as url:
        yield url + "/v1"


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as open_ai:
        yield open_ai


def test_openai_call(client: OpenAI) -> None:
    [choice] = client.chat.completions.create(model="scripted", messages=ASK, tools=TOOLS).choices
    [call] = choice.message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "One moment.")


def test_openai_puts_a_stream_together_to_the_same_message(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="scripted", messages=ASK, tools=TOOLS).choices[0]
    state = ChatCompletionStreamState(input_tools=TOOLS)
    for chunk in client.chat.completions.create(model="scripted", messages=ASK, tools=TOOLS, stream=True):
        state.handle_chunk(chunk)
    streamed = state.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    assert streamed.message.content == whole.message.content
    functions = [
        [
            (call.function.name, call.function.arguments)
            for call in message.tool_calls or []
            if call.type == "function"
        ]
        for message in (streamed.message, whole.message)
    ]
    assert functions[0] == functions[1] == [("weather", '{"city": "Paris"}')]


def test_openai_loop_of_two_turns(client: OpenAI, engine: ScriptedEngine) -> None:
    first = client.chat.completions.create(model="scripted", messages=ASK, tools=TOOLS).choices[0].message
    [call] = first.tool_calls or []
    history = [
        *ASK,
        first.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    second = client.chat.completions.create(model="scripted", messages=history, tools=TOOLS)  # type: ignore[arg-type]
    assert second.choices[0].message.content == "It has 21 degrees."
    assert second.choices[0].finish_reason == "stop"
    prompt = prompt_of(engine.jobs[-1])
    assert "One moment." in prompt
    assert CALL in prompt


def test_langchain_binds_tools(base_url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    chat = ChatOpenAI(model="scripted", base_url=base_url, api_key=SecretStr("none"))
    bound = chat.bind_tools(TOOLS)
    asked = HumanMessage("How warm is it in Paris?")
    whole = bound.invoke([asked])
    streamed = reduce(add, bound.stream([asked]))
    for message in (whole, streamed):
        [call] = message.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    result = ToolMessage(RESULT, tool_call_id=whole.tool_calls[0]["id"])
    assert bound.invoke([asked, whole, result]).content == "It has 21 degrees."


def test_a_real_model_is_made_to_call_and_reads_the_result(served: RunningServer) -> None:
    cities = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": cities, "strict": True}}
    asked: Any = {"model": MODEL, "tools": [tool], "max_tokens": 200}
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", _strict_response_validation=True) as client:
        forced: Any = {"tool_choice": "required", "parallel_tool_calls": False}
        first = client.chat.completions.create(messages=ASK, **forced, **asked).choices[0]
        [call] = first.message.tool_calls or []
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert (first.finish_reason, call.function.name) == ("tool_calls", "weather")
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
        history: Any = [*ASK, {"role": "assistant", "tool_calls": [call.to_dict()]}, result]
        asked["max_tokens"] = 8
        second = client.chat.completions.create(messages=history, tool_choice="none", **asked).choices[0]
    assert second.message.content
    assert not second.message.tool_calls


@pytest.mark.parametrize("streams", [False, True])
def test_the_sdks_own_message_goes_back_as_it_is(
    client: OpenAI, engine: ScriptedEngine, *, streams: bool
) -> None:
    """With what `parse()` and `stream()` have put into it."""
    strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    if streams:
        with client.chat.completions.stream(model="scripted", messages=ASK, tools=strict) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        parsed = client.chat.completions.parse(model="scripted", messages=ASK, tools=strict)
        message = parsed.choices[0].message
    [call] = message.tool_calls or []
    assert call.function.parsed_arguments == {"city": "Paris"}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    history: list[Any] = [*ASK, message, result]
    reply = client.chat.completions.with_raw_response.create(model="scripted", messages=history, tools=strict)
    assert reply.parse().choices[0].message.content == "It has 21 degrees."
    assert "x-dragoman-ignored" not in reply.headers
    assert "Let me ask." in prompt_of(engine.jobs[-1])
