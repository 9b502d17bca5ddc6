import json
from typing import Any

import pytest

from dragoman.api.chat import request as chat_request
from dragoman.api.chat.request import ChatRequest
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.turns.spec import ParseOptions

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def read(limits: Limits | None = None, **fields: Any) -> ChatRequest:
    return chat_request.read(json.dumps({**HELLO, **fields}).encode(), limits or Limits())


def refused(limits: Limits | None = None, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(limits, **fields)
    return caught.value


def reading(**fields: Any) -> ParseOptions:
    options = chat_request.spec(read(**fields)).parsing
    assert options is not None
    return options


@pytest.mark.parametrize(
    ("function", "place"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": 1}, "name"),
        ({"name": "f" * 257}, "name"),
        ({"name": "f"}, "name"),
        ({"name": "g", "description": 1}, "description"),
        ({"name": "g", "parameters": []}, "parameters"),
        ({"name": "g", "parameters": True}, "parameters"),
        ({"name": "g", "parameters": {"type": "string"}}, "parameters.type"),
        ({"name": "g", "parameters": {"properties": []}}, "parameters.properties"),
        ({"name": "g", "strict": "yes"}, "strict"),
    ],
)
def test_a_bad_function_is_named_by_its_place(function: dict[str, Any], place: str) -> None:
    error = refused(tools=[TOOL, {"type": "function", "function": function}])
    assert (error.param, error.code) == (f"tools[1].function.{place}", "invalid_value")


def test_a_bad_function_of_the_older_kind_is_named_too() -> None:
    assert refused(functions=[{"name": ""}]).param == "functions[0].name"


@pytest.mark.parametrize("function", [{"name": "f"}, {"name": "f", "parameters": None}, {"name": "f.g-1"}])
def test_a_function_may_be_bare(function: dict[str, Any]) -> None:
    [tool] = chat_request.conversation(read(tools=[{"type": "function", "function": function}])).tools
    assert tool == {"type": "function", "function": {"name": function["name"]}}


def test_strict_is_no_harm_where_only_a_prompt_is_made() -> None:
    body = json.dumps({**HELLO, "tools": [STRICT]}).encode()
    assert chat_request.read_to_render(body, Limits()).declared.functions == [STRICT["function"]]


def test_tools_and_functions_exclude_each_other() -> None:
    assert refused(tools=[TOOL], functions=[{"name": "g"}]).param == "functions"


def test_tools_have_a_limit_of_bytes() -> None:
    long = {"type": "function", "function": {"name": "f", "description": "x" * 1000}}
    error = refused(Limits(tool_bytes=1000), tools=[long])
    assert (error.param, error.code) == ("tools", "limit_exceeded")


def test_functions_are_tools() -> None:
    conversation = chat_request.conversation(read(functions=[{"name": "f"}]))
    assert conversation.tools == ({"type": "function", "function": {"name": "f"}},)


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({}, False),
        ({"tools": []}, False),
        ({"tools": [TOOL]}, True),
        ({"tools": [TOOL], "tool_choice": "auto"}, True),
        ({"tools": [TOOL], "tool_choice": "none"}, False),
        ({"tools": [TOOL], "parse_tool_calls": False}, False),
        ({"functions": [{"name": "f"}]}, True),
        ({"functions": [{"name": "f"}], "function_call": "none"}, False),
        ({"tools": [TOOL], "function_call": "none"}, False),
    ],
)
def test_calls_are_looked_for_where_there_can_be_any(fields: dict[str, Any], calls: bool) -> None:
    assert reading(**fields).calls is calls


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({}, True),
        ({"separate_reasoning": True}, True),
        ({"separate_reasoning": False}, False),
        ({"reasoning_format": "none"}, False),
        ({"reasoning_format": "deepseek"}, True),
        ({"include_reasoning": False}, True),
    ],
)
def test_reasoning_is_set_apart_unless_the_client_does_not_want_it(
    fields: dict[str, Any], reasoning: bool
) -> None:
    assert reading(**fields).reasoning is reasoning


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, None),
        ({"parallel_tool_calls": True}, None),
        ({"parallel_tool_calls": False}, 1),
        ({"tools": None, "functions": [{"name": "f"}]}, 1),
    ],
)
def test_how_many_calls_there_may_be(fields: dict[str, Any], most: int | None) -> None:
    assert reading(**{"tools": [TOOL], **fields}).most_calls == most


@pytest.mark.parametrize("arguments", ['{"a": 1', "hello", "{'a': 1}", "[" * 100_000])
def test_arguments_in_the_history_are_what_a_model_wrote(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    message = chat_request.conversation(read(messages=messages)).messages[1]
    assert message.tool_calls[0].arguments == arguments


@pytest.mark.parametrize(
    ("arguments", "text"), [("", "{}"), (None, "{}"), ({"a": 1}, '{"a":1}'), ("{ }", "{ }")]
)
def test_arguments_in_the_history_keep_their_text(arguments: Any, text: str) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    [call] = chat_request.conversation(read(messages=[message])).messages[0].tool_calls
    assert call.arguments == text


def test_a_result_may_answer_a_call_that_is_not_there() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "lost", "content": "1"}]
    assert chat_request.conversation(read(messages=messages)).messages[1].tool_call_id == "lost"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_earlier_reasoning_has_three_names(field: str) -> None:
    [message] = chat_request.conversation(read(messages=[{"role": "assistant", field: "hm"}])).messages
    assert message.reasoning == "hm"
