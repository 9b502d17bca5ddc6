"""A turn that asks for too much of anything is refused, whatever API it came through."""

from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.turns.spec import TurnSpec, check_told_prompts, check_turn, tokens_told
from dragoman.types import Sampling, TextPrompt

SMALL = Limits(choices=4, stops=2, stop_chars=3, logit_bias=1, bad_words=1, token_ids=1, logprobs=5)
MOST = TurnSpec(
    model=None,
    prompts=(TextPrompt("a"), TextPrompt("b")),
    n=2,
    stop=("abc",),
    bad_words=("a",),
    sampling=Sampling(
        max_tokens=1,
        stop_token_ids=frozenset({1}),
        logit_bias={1: 1.0},
        allowed_token_ids=(1,),
        logprobs=5,
        prompt_logprobs=5,
    ),
)
TOO_MUCH: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "stop": {"stop": ("a", "b")},
    "bad_words": {"bad_words": ("a", "b")},
}
TOO_MUCH_SAMPLING: dict[str, dict[str, Any]] = {
    "stop": {"stop_token_ids": frozenset({1, 2})},
    "logit_bias": {"logit_bias": {1: 1.0, 2: 1.0}},
    "allowed_token_ids": {"allowed_token_ids": (1, 2)},
    "alternatives": {"logprobs": 6},
    "prompt_logprobs": {"prompt_logprobs": 6},
}


def refused(spec: TurnSpec) -> str | None:
    with pytest.raises(BadRequest) as caught:
        check_turn(spec, SMALL)
    assert caught.value.code == "limit_exceeded"
    return caught.value.param


def test_as_much_as_is_allowed() -> None:
    check_turn(MOST, SMALL)


@pytest.mark.parametrize("param", TOO_MUCH)
def test_too_much_is_named(param: str) -> None:
    assert refused(replace(MOST, **TOO_MUCH[param])) == param


@pytest.mark.parametrize("param", TOO_MUCH_SAMPLING)
def test_too_much_of_sampling_is_named(param: str) -> None:
    sampling = replace(MOST.sampling, **TOO_MUCH_SAMPLING[param])
    assert refused(replace(MOST, sampling=sampling)) == param


def test_a_long_stop_string() -> None:
    assert refused(replace(MOST, stop=("abcd",))) == "stop"


def test_an_answer_ends_where_its_log_probabilities_would_be_too_many() -> None:
    asked = replace(MOST, sampling=Sampling(max_tokens=0, logprobs=5))
    assert tokens_told(asked, 1000, Limits(told_logprobs=240)) == 10


def test_more_log_probabilities_than_are_told_cannot_be_asked_for() -> None:
    asked = replace(MOST, sampling=Sampling(max_tokens=1000, logprobs=5))
    with pytest.raises(BadRequest, match="ask for 10 tokens") as caught:
        tokens_told(asked, 11, Limits(told_logprobs=240))
    assert caught.value.param == "alternatives"
    assert tokens_told(asked, 10, Limits(told_logprobs=240)) == 10


def test_without_alternatives_an_answer_is_as_long_as_it_may_be() -> None:
    asked = replace(MOST, sampling=Sampling(max_tokens=1000, logprobs=0))
    assert tokens_told(asked, 1000, Limits(told_logprobs=1)) == 1000


def test_log_probabilities_of_prompts_count_for_each_answer() -> None:
    asked = replace(MOST, sampling=Sampling(max_tokens=1, prompt_logprobs=1))
    check_told_prompts(asked, [3, 2], Limits(told_logprobs=20))
    with pytest.raises(BadRequest, match="got 24"):
        check_told_prompts(asked, [3, 3], Limits(told_logprobs=20))
