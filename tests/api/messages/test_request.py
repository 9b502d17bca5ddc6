"""What a request of Messages asks for, and what is refused."""

from typing import Any

import pytest

from dragoman.api.messages.request import spec
from dragoman.api.request_decoder import IgnoredFields
from dragoman.errors import BadRequest
from dragoman.turns.spec import ReasoningTokenLimit, ToolCallPolicy
from dragoman.types import Conversation
from tests.api.messages.asking import CALL, RESULT, TOOL, USER, asked

OTHER = {"name": "walk", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def conversation(**fields: Any) -> Conversation:
    (item,) = spec(asked(**fields)).prompts
    assert isinstance(item, Conversation)
    return item


def tools(**fields: Any) -> list[str]:
    return [tool["function"]["name"] for tool in conversation(**fields).tools]


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
def test_what_is_required(name: str) -> None:
    with pytest.raises(BadRequest) as wrong:
        asked(**{name: None})
    assert (wrong.value.param, wrong.value.code) == (name, "missing_field")


def test_a_last_message_of_the_assistant_is_continued() -> None:
    item = spec(asked(USER, {"role": "assistant", "content": "The answer is"})).prompts[0]
    assert isinstance(item, Conversation)
    assert (item.continue_final_message, item.add_generation_prompt) == (True, False)


def test_calls_want_their_results() -> None:
    with pytest.raises(BadRequest, match="results"):
        asked(USER, {"role": "assistant", "content": [CALL]}, tools=[TOOL])


@pytest.mark.parametrize(
    ("choice", "calling"),
    [
        (None, None),
        ({"type": "auto"}, None),
        ({"type": "none"}, None),
        ({"type": "any"}, ToolCallPolicy(required=True)),
        ({"type": "tool", "name": "look"}, ToolCallPolicy(required=True, named=True, names=("look",))),
    ],
)
def test_what_a_choice_asks_for(choice: dict[str, Any] | None, calling: ToolCallPolicy | None) -> None:
    turn_spec = spec(asked(tools=[TOOL], tool_choice=choice))
    assert turn_spec.tool_policy == calling
    assert turn_spec.parsing is not None
    assert turn_spec.parsing.calls is (choice != {"type": "none"})


@pytest.mark.parametrize("kind", ["auto", "any"])
def test_one_call_at_a_time(kind: str) -> None:
    choice = {"type": kind, "disable_parallel_tool_use": True}
    reading = spec(asked(tools=[TOOL], tool_choice=choice)).parsing
    assert reading is not None
    assert reading.most_calls == 1


@pytest.mark.parametrize(
    ("choice", "place"),
    [
        ({"type": "any"}, "tool_choice"),
        ({"type": "tool", "name": "look"}, "tool_choice"),
        ({"type": "auto", "name": "look"}, "tool_choice.name"),
        ({"type": "often"}, "tool_choice.type"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(choice: dict[str, Any], place: str) -> None:
    with pytest.raises(BadRequest) as wrong:
        asked(tool_choice=choice)
    assert wrong.value.param == place


def test_a_strict_tool_is_called_as_its_schema_says() -> None:
    assert spec(asked(tools=[{**TOOL, "strict": True}])).tool_policy == ToolCallPolicy(
        param="tools[0].strict"
    )


def test_a_tool_is_loaded_once_it_was_named() -> None:
    later = {**OTHER, "defer_loading": True}
    assert tools(tools=[TOOL, later]) == ["look"]
    fields = {**RESULT, "content": [{"type": "tool_reference", "tool_name": "walk"}]}
    mapping = {"role": "assistant", "content": [CALL]}
    messages = [USER, mapping, {"role": "user", "content": [fields]}]
    assert tools(tools=[TOOL, later], messages=messages) == ["look", "walk"]
    assert tools(tools=[TOOL, later], tool_choice={"type": "tool", "name": "walk"}) == ["look", "walk"]


def test_examples_are_told_with_the_description() -> None:
    (tool,) = conversation(
        tools=[{**TOOL, "description": "Looks.", "input_examples": [{"city": "Rome"}]}]
    ).tools
    assert tool["function"]["description"] == 'Looks.\n\nExamples of the input:\n{"city":"Rome"}'


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "tools[0].type"),
        ({"type": "bash_20250124", "name": "bash"}, "tools[0].type"),
        ({"name": "look"}, "tools[0].input_schema"),
        ({"name": "look", "input_schema": {"type": "array"}}, "tools[0].input_schema.type"),
        ({**TOOL, "allowed_callers": ["code_execution_20250825"]}, "tools[0].allowed_callers"),
        ({**TOOL, "defer_loading": True}, "tools"),
    ],
)
def test_a_tool_that_cannot_be_is_refused(tool: dict[str, Any], place: str) -> None:
    with pytest.raises(BadRequest) as wrong:
        asked(tools=[tool])
    assert wrong.value.param == place


@pytest.mark.parametrize(
    ("thinking", "kwargs", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True, 1024),
        ({"type": "adaptive", "display": "omitted"}, True, None),
        ({"type": "disabled"}, False, None),
        (None, None, None),
    ],
)
def test_thinking(thinking: dict[str, Any] | None, kwargs: bool | None, budget: int | None) -> None:
    turn_spec = spec(asked(thinking=thinking))
    item = turn_spec.prompts[0]
    assert isinstance(item, Conversation)
    assert item.template_kwargs.get("enable_thinking") is kwargs
    asked_for = (
        None
        if budget is None
        else ReasoningTokenLimit(tokens=budget, param="thinking.budget_tokens", soft=True)
    )
    assert turn_spec.reasoning_limit == asked_for


def test_the_latest_effort_counts() -> None:
    assert conversation(output_config={"effort": "low"}).template_kwargs == {"reasoning_effort": "low"}
    louder = {"role": "system", "content": "Think.", "output_config": {"effort": "max"}}
    item = spec(asked(USER, louder, output_config={"effort": "low"})).prompts[0]
    assert isinstance(item, Conversation)
    assert item.template_kwargs == {"reasoning_effort": "max"}


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_format_holds_the_text_to_a_schema(field: str) -> None:
    wish: dict[str, Any] = {"type": "json_schema", "schema": SCHEMA}
    fields: dict[str, Any] = {field: {"format": wish} if field == "output_config" else wish}
    wanted = spec(asked(**fields)).output_constraint
    assert wanted is not None
    assert (wanted.syntax, wanted.value) == ("json_schema", SCHEMA)


def test_sampling() -> None:
    turn_spec = spec(asked(stop_sequences=["END"], top_k=5, temperature=0.5, max_tokens=7))
    assert turn_spec.stop == ("END",)
    assert (turn_spec.sampling.top_k, turn_spec.sampling.temperature, turn_spec.sampling.max_tokens) == (
        5,
        0.5,
        7,
    )


def test_what_has_no_effect_is_told() -> None:
    ignored = IgnoredFields()
    asked(
        cache_control={"type": "ephemeral"}, service_tier="auto", speed="fast", colour="red", ignored=ignored
    )
    assert ignored.summary == "colour, service_tier, cache_control, speed"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("container", "container_1"),
        ("thread", {"type": "create"}),
        ("n", 2),
        ("logprobs", True),
        ("return_token_ids", True),
        ("echo", True),
        ("stop_sequences", [""]),
        ("context_management", {"edits": [{"type": "clear_everything"}]}),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadRequest) as wrong:
        asked(**{field: value})
    assert (wrong.value.param or "").startswith(field)
