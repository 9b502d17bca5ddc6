import json
from typing import Any

import pytest

from dragoman.api.chat import request as chat_request
from dragoman.api.chat.request import ChatRequest
from dragoman.errors import BadRequest
from dragoman.limits import Limits

REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}


def custom(name: str = "sql", **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **fields}}


def read(*tools: dict[str, Any], **fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, **fields}
    return chat_request.read(json.dumps(body).encode(), Limits())


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    request = read(custom(description="ask"), custom("word", format=REGEX))
    first, second = (tool["function"] for tool in chat_request.conversation(request).tools)
    assert (first["name"], first["description"]) == ("sql", "ask")
    assert first["parameters"]["properties"] == {"input": {"type": "string"}}
    assert second["parameters"]["properties"] == {"input": {"type": "string", "pattern": "^(?:[a-z]+)$"}}


def test_a_grammar_is_told_to_the_model() -> None:
    request = read(custom(format=LARK, description="Say it."), custom("word", format=REGEX))
    first, second = (tool["function"] for tool in chat_request.conversation(request).tools)
    assert first["parameters"]["properties"] == {"input": {"type": "string", "x-lark": 'start: "a"'}}
    assert first["description"] == 'Say it.\n\nThe input must match this Lark grammar:\nstart: "a"'
    assert second["description"] == "The input must match this regular expression:\n[a-z]+"


def test_messages_name_what_was_declared() -> None:
    reading = chat_request.spec(read(custom(), {"type": "function", "function": {"name": "f"}})).parsing
    assert reading is not None
    assert reading.params == ("tools[0].custom.parameters", "tools[1].function.parameters")


def test_its_calls_are_read_back() -> None:
    spec = chat_request.spec(read(custom(), {"type": "function", "function": {"name": "f"}}))
    assert spec.parsing is not None
    assert spec.parsing.custom == {"sql"}
    assert spec.tool_policy is not None
    assert spec.tool_policy.param == "tools[0].custom.strict"


def test_it_can_be_named() -> None:
    asked = chat_request.spec(read(custom(), tool_choice=custom())).tool_policy
    assert asked is not None
    assert (asked.named, asked.names) == (True, ("sql",))


def test_an_earlier_call_is_quoted_again() -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "sql", "input": 'say "hi"'}}
    request = read(custom(), messages=[{"role": "assistant", "tool_calls": [call]}])
    [tool_call] = chat_request.conversation(request).messages[0].tool_calls
    assert json.loads(tool_call.arguments) == {"input": 'say "hi"'}


@pytest.mark.parametrize(
    ("tool", "param", "code"),
    [
        (custom(format={"type": "grammar"}), "tools[0].custom.format.grammar", "missing_field"),
        ({"type": "custom"}, "tools[0]", "invalid_value"),
        ({"type": "function"}, "tools[0]", "invalid_value"),
        ({**custom(), "function": {"name": "f"}}, "tools[0]", "invalid_value"),
        (custom(""), "tools[0].custom.name", "invalid_value"),
    ],
)
def test_what_cannot_be_used(tool: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(tool)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_a_call_without_a_function_is_refused() -> None:
    with pytest.raises(BadRequest) as caught:
        read(messages=[{"role": "assistant", "tool_calls": [{"id": "1"}]}])
    assert caught.value.param == "messages[0].tool_calls[0].function"
