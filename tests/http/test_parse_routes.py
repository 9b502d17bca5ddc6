"""The parsers as a service, in the shapes of smg and SGLang."""

from typing import Any

import pytest

from dragoman.engines.scripted import ScriptedEngine, say
from tests.http.conftest import Serve
from tests.support.http import post

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
ROUTES = ("/parse/function_call", "/parse_function_call", "/parse/reasoning", "/separate_reasoning")


@pytest.fixture
def url(serve: Serve) -> str:
    return serve(ScriptedEngine(say("x")), dialect="hermes")


def test_function_call(url: str) -> None:
    body = {"text": f"Well.{CALL}", "tool_call_parser": "hermes", "tools": TOOLS}
    reply = post(url, "/parse/function_call", body).json()
    [call] = reply["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert (reply["remaining_text"], reply["success"]) == ("Well.", True)


def test_function_call_as_sglang_has_it(url: str) -> None:
    body = {"text": f"Well.{CALL}{CALL}", "tool_call_parser": "qwen25", "tools": TOOLS}
    assert post(url, "/parse_function_call", body).json() == {
        "normal_text": "Well.",
        "calls": [{"tool_index": n, "name": "f", "parameters": '{"a": 1}'} for n in range(2)],
    }


def test_reasoning(url: str) -> None:
    body = {"text": "<think>Hm.</think>Yes.", "reasoning_parser": "hermes"}
    assert post(url, "/parse/reasoning", body).json() == {
        "normal_text": "Yes.",
        "reasoning_text": "Hm.",
        "success": True,
    }


@pytest.mark.parametrize("text", ["<think>Hm.</think>Yes.", "Hm.</think>Yes."])
def test_reasoning_as_sglang_has_it(url: str, text: str) -> None:
    body = {"text": text, "reasoning_parser": "deepseek-r1"}
    assert post(url, "/separate_reasoning", body).json() == {"text": "Yes.", "reasoning_text": "Hm."}


def test_without_a_name_the_models_own_dialect_is_read(url: str) -> None:
    [call] = post(url, "/parse/function_call", {"text": CALL}).json()["tool_calls"]
    assert call["function"]["name"] == "f"


def test_what_is_not_asked_for_is_left_alone(url: str) -> None:
    text = f"<think>Hm.</think>{CALL}"
    assert post(url, "/parse/function_call", {"text": text}).json()["remaining_text"] == "<think>Hm.</think>"
    assert post(url, "/parse/reasoning", {"text": text}).json()["normal_text"] == CALL


def test_a_text_without_calls(url: str) -> None:
    reply = post(url, "/parse/function_call", {"text": "Just so."}).json()
    assert reply == {"remaining_text": "Just so.", "tool_calls": [], "success": True}


@pytest.mark.parametrize("route", ROUTES)
def test_an_unknown_parser_is_refused_with_the_names_there_are(url: str, route: str) -> None:
    field = "reasoning_parser" if "reasoning" in route else "tool_call_parser"
    reply = post(url, route, {"text": "x", field: "nobody"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, field, "invalid_value")
    assert "hermes" in error["message"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("body", "param"), [({}, "text"), ({"text": 1}, "text"), ({"text": "x", "txet": 1}, "txet")]
)
def test_bad_bodies_are_refused(url: str, route: str, body: dict[str, Any], param: str) -> None:
    reply = post(url, route, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("route", ROUTES)
def test_they_want_the_key(serve: Serve, route: str) -> None:
    url = serve(ScriptedEngine(say("x")), api_key=["secret"])
    assert post(url, route, {"text": "x"}).status_code == 401
    assert post(url, route, {"text": "x"}, authorization="Bearer secret").status_code == 200


def test_bad_tools_are_refused_by_name(url: str) -> None:
    reply = post(url, "/parse/function_call", {"text": "x", "tools": [{"function": {"name": ""}}]})
    assert reply.json()["error"]["param"] == "tools[0].function.name"


def test_a_long_text_is_read(url: str) -> None:
    text = "word " * 20_000
    reply = post(url, "/parse/function_call", {"text": text + CALL}).json()
    assert len(reply["remaining_text"]) >= len(text) - 1
    assert len(reply["tool_calls"]) == 1
