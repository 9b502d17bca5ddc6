import json
from typing import Any

import pytest

from dragoman.api.responses import request as requests
from dragoman.api.responses.items import normalise
from dragoman.api.responses.request import ResponseRequest
from dragoman.api.responses.tools import offer_tools
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.turns.spec import OutputConstraint, ReasoningTokenLimit, TurnSpec
from dragoman.types import Conversation

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


def read(**fields: Any) -> ResponseRequest:
    return requests.read(json.dumps({"input": "hi", **fields}).encode(), Limits())


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    return caught.value


def spec(*, first: bool = True, **fields: Any) -> TurnSpec:
    request = read(**fields)
    items = normalise(request.input, lambda prefix: f"{prefix}1")
    offer = offer_tools(request.tools, Limits())
    return requests.spec(request, items, offer, first=first, unseal=lambda sealed: None)


def told(**fields: Any) -> Conversation:
    [prompt] = spec(**fields).prompts
    assert isinstance(prompt, Conversation)
    return prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": None, "truncation": None, "user": None, "prompt": None, "moderation": None},
        {"include": ["reasoning.encrypted_content"], "store": False, "client_metadata": {"x": "y"}},
        {"reasoning": {"effort": "max", "summary": "auto", "context": "all_turns", "mode": "pro"}},
        {"conversation": "conv_1"},
        {"conversation": {"id": "conv_1"}},
        {"input": [], "instructions": "be kind"},
        {"input": None, "previous_response_id": "resp_1"},
        {"background": True},
        {"n": 1, "echo": False},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
        {"top_k": 5, "min_p": 0.1, "seed": 1, "stop": ["x"], "stop_token_ids": [1], "min_tokens": 1},
        {"priority": 1, "cache_salt": "s", "return_token_ids": True, "skip_special_tokens": False},
        {"image": {"context_compression": "auto"}, "prompt_cache_key": "k", "service_tier": "auto"},
    ],
)
def test_what_clients_send_is_read(fields: dict[str, Any]) -> None:
    assert isinstance(read(**fields), ResponseRequest)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "missing_field"),
        ({"input": []}, "input", "missing_field"),
        ({"input": 3}, "input", "invalid_value"),
        ({"inputs": "x"}, "inputs", "unknown_field"),
        ({"n": 2}, "n", "unsupported_field"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_field"),
        ({"response_format": {"type": "text"}}, "response_format", "unsupported_field"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_field"),
        ({"moderation": {}}, "moderation", "unsupported_field"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "unsupported_field"),
        ({"include": ["everything"]}, "include[0]", "invalid_value"),
        ({"previous_response_id": "r", "conversation": "c"}, "conversation", "invalid_value"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"top_logprobs": 21}, "top_logprobs", "limit_exceeded"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": True}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": 1, "min_tokens": 2}, "min_tokens", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"max_tool_calls": 0}, "max_tool_calls", "invalid_value"),
        ({"truncation": "middle"}, "truncation", "invalid_value"),
        ({"metadata": {"k": "v" * 513}}, "metadata[...]", "invalid_value"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
        ({"reasoning": {"loud": True}}, "reasoning.loud", "unknown_field"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "missing_field"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex", "invalid_value"),
        ({"context_management": [{"type": "forget"}]}, "context_management[0].type", "invalid_value"),
        ({"tools": [{"type": "teleport"}]}, "tools[0].type", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(**fields)
    assert (error.param, error.code) == (param, code)


def test_there_is_a_limit_of_items() -> None:
    body = json.dumps({"input": [{"role": "user", "content": "x"}] * 3}).encode()
    with pytest.raises(BadRequest) as caught:
        requests.read(body, Limits(messages=2))
    assert (caught.value.param, caught.value.code) == ("input", "limit_exceeded")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("format_", "wanted"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, OutputConstraint(syntax="json_object", param="text.format")),
        (
            {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA},
            OutputConstraint(syntax="json_schema", value=SCHEMA, param="text.format.schema"),
        ),
    ],
)
def test_the_format_is_what_the_text_must_be(
    format_: dict[str, Any], wanted: OutputConstraint | None
) -> None:
    asked = spec(text={"format": format_})
    assert asked.output_constraint == wanted
    assert asked.parsing is not None and asked.parsing.verbatim is (wanted is not None)


def test_instructions_come_first() -> None:
    messages = told(instructions="be kind").messages
    assert [(message.role, message.content) for message in messages] == [
        ("system", "be kind"),
        ("user", "hi"),
    ]


def test_the_template_is_told_of_effort_and_verbosity() -> None:
    kwargs = told(reasoning={"effort": "low"}, text={"verbosity": "high"}, chat_template_kwargs={"a": 1})
    assert kwargs.template_kwargs == {"reasoning_effort": "low", "verbosity": "high", "a": 1}


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        (
            {"reasoning": {"effort": "none"}},
            ReasoningTokenLimit(tokens=0, param="reasoning_effort", soft=True),
        ),
        ({"reasoning": {"max_tokens": 9}}, ReasoningTokenLimit(tokens=9, param="reasoning.max_tokens")),
        ({"thinking_token_budget": 9}, ReasoningTokenLimit(tokens=9, param="thinking_token_budget")),
        ({"reasoning": {"summary": "auto"}}, None),
    ],
)
def test_how_long_reasoning_may_be(fields: dict[str, Any], thinking: ReasoningTokenLimit | None) -> None:
    assert spec(**fields).reasoning_limit == thinking


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"top_logprobs": 3}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 3}, 3),
    ],
)
def test_log_probabilities_come_where_they_are_included(fields: dict[str, Any], logprobs: int | None) -> None:
    assert spec(**fields).sampling.logprobs == logprobs


def test_the_answer_may_be_no_longer_than_asked() -> None:
    assert spec(max_output_tokens=7).sampling.max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "calls", "most"),
    [
        ({}, False, None),
        ({"tools": [{"type": "web_search"}]}, False, None),
        ({"tools": [FUNCTION]}, True, None),
        ({"tools": [FUNCTION], "tool_choice": "none"}, False, None),
        ({"tools": [FUNCTION], "parallel_tool_calls": False}, True, 1),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}}, True, 1),
    ],
)
def test_which_calls_are_looked_for(fields: dict[str, Any], calls: bool, most: int | None) -> None:
    reading = spec(**fields).parsing
    assert reading is not None and (reading.calls, reading.most_calls) == (calls, most)


def test_a_named_tool_is_called_once_and_then_no_longer_asked_for() -> None:
    fields: dict[str, Any] = {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}}
    later = spec(first=False, **fields)
    assert later.tool_policy is None and later.parsing is not None and later.parsing.most_calls is None


def test_what_was_asked_is_echoed() -> None:
    request = read(reasoning={"effort": "low"}, text={"format": {"type": "json_object"}})
    assert request.echoed_reasoning == {"effort": "low", "summary": None}
    assert request.echoed_text == {"format": {"type": "json_object"}, "verbosity": "medium"}


@pytest.mark.parametrize(("given", "id_"), [(None, None), ("c", "c"), ({"id": "c"}, "c")])
def test_a_conversation_is_named_in_two_ways(given: Any, id_: str | None) -> None:
    assert read(conversation=given).conversation_id == id_


def test_the_lowest_threshold_of_compaction_holds() -> None:
    managed = [{"type": "compaction", "compact_threshold": tokens} for tokens in (900, 300)]
    assert read(context_management=managed).compact_threshold == 300
