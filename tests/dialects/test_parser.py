"""Whole texts by the name of a parser, in smg's shapes."""

import pytest

import dragoman

CALL = '<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>'


def test_calls_and_the_text_around_them() -> None:
    assert dragoman.parse_tool_call_complete(f"Well.{CALL}", "qwen") == {
        "normal_text": "Well.",
        "tool_calls": [{"name": "f", "arguments": '{"a":  1}'}],
    }


def test_a_call_that_is_nothing_but_json() -> None:
    text = '{"name": "get_weather", "arguments": {"city": "SF", "unit": "celsius"}}'
    [call] = dragoman.parse_tool_call_complete(text, "json")["tool_calls"]
    assert call == {"name": "get_weather", "arguments": '{"city": "SF", "unit": "celsius"}'}


@pytest.mark.parametrize("text", ["<think>Hm.</think>Yes.", "Hm.</think>Yes."])
def test_reasoning_and_the_rest(text: str) -> None:
    reasoning_complete = dragoman.parse_reasoning_complete(text, "qwen3")
    assert reasoning_complete == {"normal_text": "Yes.", "reasoning_text": "Hm."}


def test_text_without_either_is_text() -> None:
    assert dragoman.parse_tool_call_complete("Yes.", "qwen") == {"normal_text": "Yes.", "tool_calls": []}
    assert dragoman.parse_reasoning_complete("Yes.", "qwen3") == {"normal_text": "Yes.", "reasoning_text": ""}


def test_each_leaves_alone_what_is_not_its_own() -> None:
    text = f"<think>Hm.</think>{CALL}"
    assert dragoman.parse_tool_call_complete(text, "hermes")["normal_text"] == "<think>Hm.</think>"
    assert dragoman.parse_reasoning_complete(text, "hermes")["normal_text"] == CALL


def test_unknown_names_are_value_errors() -> None:
    with pytest.raises(ValueError, match="unknown tool parser"):
        dragoman.parse_tool_call_complete("x", "definitely-not")
    with pytest.raises(ValueError, match="unknown reasoning parser"):
        dragoman.parse_reasoning_complete("x", "definitely-not")


SMG = (
    "base cohere_cmd deepseek_r1 deepseek_v31 glm45 kimi kimi_k25 kimi_thinking minimax nano_v3 none qwen3"
    " qwen3_thinking step3 cohere deepseek deepseek31 deepseek32 deepseek_v4 glm45_moe glm47_moe json kimik2"
    " llama minimax_m2 mistral passthrough pythonic qwen qwen_coder qwen_xml sarashina"
)


@pytest.mark.parametrize("name", SMG.split())
def test_the_names_of_smg_are_known(name: str) -> None:
    assert dragoman.parse_tool_call_complete("Yes.", name)["normal_text"] == "Yes."


LONE = '{"name": "f", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("strict", "json_answer", "calls"),
    [(False, False, ["f"]), (True, False, []), (False, True, [])],
    ids=["free", "strict", "JSON was asked for"],
)
def test_a_call_without_a_marker_is_text_where_it_may_be_mistaken(
    strict: bool, json_answer: bool, calls: list[str]
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": strict}}]
    answer = dragoman.parse(LONE, "hermes", tools, json_answer=json_answer)
    assert ([call.name for call in answer.calls], answer.text) == (calls, "" if calls else LONE)


def test_what_cannot_become_a_call_is_not_held_back() -> None:
    parser = dragoman.Parser("hermes", [{"type": "function", "function": {"name": "f"}}])
    assert parser.feed('{"name": "f", "arguments": {"a": ') == []
    assert parser.feed("1}}\n") == []
    assert [event.text for event in parser.feed("is")] == ['{"name": "f", "arguments": {"a": 1}}\nis']
    other = dragoman.Parser("hermes", [{"type": "function", "function": {"name": "f"}}])
    assert [event.text for event in other.feed('{"city": 1')] == ['{"city": 1']
