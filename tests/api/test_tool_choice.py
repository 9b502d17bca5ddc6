import json
from typing import Any

import pytest

from dragoman.api.chat import request as chat_request
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.turns.spec import ToolCallPolicy, TurnSpec


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


HELLO = {"messages": [{"role": "user", "content": "hi"}], "tools": [function("f"), function("g")]}


def spec(**fields: Any) -> TurnSpec:
    return chat_request.spec(chat_request.read(json.dumps({**HELLO, **fields}).encode(), Limits()))


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        spec(**fields)
    return caught.value


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


FORCED = ToolCallPolicy(required=True)
NAMED = ToolCallPolicy(required=True, named=True, names=("g",))


@pytest.mark.parametrize(
    ("choice", "asked"),
    [
        (None, None),
        ("auto", None),
        ("none", None),
        ("required", FORCED),
        (function("g"), NAMED),
        ({"type": "function", "name": "g"}, NAMED),
        (allowed("auto", function("g")), ToolCallPolicy(names=("g",))),
        (allowed("required", function("g")), ToolCallPolicy(required=True, names=("g",))),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
         ToolCallPolicy(names=("f",))),
    ],
)  # fmt: skip
def test_what_a_choice_asks_for(choice: Any, asked: ToolCallPolicy | None) -> None:
    assert spec(tool_choice=choice).tool_policy == asked


@pytest.mark.parametrize(
    ("choice", "asked"),
    [
        ("none", None),
        ("auto", None),
        ({"name": "g"}, ToolCallPolicy(required=True, named=True, names=("g",), param="function_call")),
    ],
)
def test_the_older_form(choice: Any, asked: ToolCallPolicy | None) -> None:
    functions = [{"name": "f"}, {"name": "g"}]
    assert spec(tools=None, functions=functions, function_call=choice).tool_policy == asked


def test_a_strict_tool_asks_by_itself() -> None:
    asked = spec(tools=[function("f"), function("g", strict=True)]).tool_policy
    assert asked == ToolCallPolicy(param="tools[1].function.strict")
    assert spec(tools=[function("f", strict=True)], tool_choice="none").tool_policy is None


def test_a_named_tool_is_called_once() -> None:
    reading = spec(tool_choice=function("g")).parsing
    assert reading is not None
    assert reading.most_calls == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": []}, "tool_choice"),
        ({"tool_choice": {"type": "web"}}, "tool_choice"),
        ({"tool_choice": function("h")}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": "g"}}, "tool_choice.function"),
        ({"tool_choice": allowed("maybe", function("g"))}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("auto", function("h"))}, "tool_choice"),
        ({"tool_choice": allowed("auto", {"type": "mcp"})}, "tool_choice.allowed_tools.tools[0].type"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "parse_tool_calls": False}, "parse_tool_calls"),
        ({"tools": None, "functions": [{"name": "f"}], "function_call": {"name": "x"}}, "function_call"),
        ({"tools": None, "functions": [{"name": "f"}], "function_call": "some"}, "function_call"),
    ],
)
def test_a_choice_that_cannot_be_made(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.param, error.code) == (param, "invalid_value")
