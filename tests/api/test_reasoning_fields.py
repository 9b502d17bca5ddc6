import json
from typing import Any

import pytest

from dragoman.api.chat import request as chat_request
from dragoman.api.chat.request import ChatRequest
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.turns.spec import ReasoningTokenLimit


def read(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return chat_request.read(json.dumps(body).encode(), Limits())


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "enable_thinking": True},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
        ({"reasoning": {"enabled": True}}, {"enable_thinking": True}),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "low"}, {"reasoning_effort": "low"}),
    ],
)
def test_what_the_template_is_told(fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    assert chat_request.conversation(read(**fields)).template_kwargs == kwargs


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, None),
        ({"thinking_token_budget": 5}, ReasoningTokenLimit(tokens=5, param="thinking_token_budget")),
        ({"reasoning_budget_tokens": 5}, ReasoningTokenLimit(tokens=5, param="reasoning_budget_tokens")),
        ({"reasoning_budget": 0}, ReasoningTokenLimit(tokens=0, param="reasoning_budget")),
        ({"thinking_budget": -1}, None),
        ({"reasoning": {"max_tokens": 9}}, ReasoningTokenLimit(tokens=9, param="reasoning.max_tokens")),
        ({"reasoning_effort": "none"}, ReasoningTokenLimit(tokens=0, param="reasoning_effort", soft=True)),
        (
            {"reasoning_effort": "none", "thinking_budget": 7},
            ReasoningTokenLimit(tokens=7, param="thinking_budget"),
        ),
        ({"reasoning_effort": "high"}, None),
    ],
)
def test_how_long_reasoning_may_be(fields: dict[str, Any], budget: ReasoningTokenLimit | None) -> None:
    assert chat_request.spec(read(**fields)).reasoning_limit == budget


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
        ({"reasoning": {"enabled": True}, "enable_thinking": False}, "reasoning.enabled"),
        ({"thinking_budget": 1, "thinking_token_budget": 1}, "thinking_budget"),
        ({"thinking_budget": 1, "reasoning": {"max_tokens": 1}}, "reasoning.max_tokens"),
        ({"thinking_budget": -2}, "thinking_budget"),
    ],
)
def test_what_is_said_twice(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")
