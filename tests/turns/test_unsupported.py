"""A field that the engine does not honour is refused, and only then."""

from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.engines.protocol import UNSUPPORTABLE
from dragoman.errors import BadRequest
from dragoman.turns.spec import TurnSpec
from dragoman.turns.unsupported import refuse_unsupported
from dragoman.types import Sampling, TextPrompt

SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.1,
    "logit_bias": {1: 1.0},
    "allowed_token_ids": (1,),
    "stop_token_ids": frozenset({1}),
    "min_tokens": 1,
    "ignore_eos": True,
    "seed": 0,
    "logprobs": 0,
    "prompt_logprobs": 0,
}
OTHERS: dict[str, Any] = {"bad_words": ("no",), "priority": -1, "cache_salt": "s", "reuse_prefix": False}
PLAIN = TurnSpec(model=None, prompts=(TextPrompt("hi"),), sampling=Sampling(max_tokens=1))


def spec_with(name: str) -> TurnSpec:
    if name in SAMPLING:
        return replace(PLAIN, sampling=replace(PLAIN.sampling, **{name: SAMPLING[name]}))
    return replace(PLAIN, **{name: OTHERS[name]})


def test_every_field_can_be_refused() -> None:
    assert SAMPLING.keys() | OTHERS.keys() == UNSUPPORTABLE


@pytest.mark.parametrize("name", sorted(UNSUPPORTABLE))
def test_what_is_asked_is_refused_by_its_public_name(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        refuse_unsupported(spec_with(name), frozenset({name}))
    assert caught.value.param == {"reuse_prefix": "cache_prompt"}.get(name, name)
    assert caught.value.code == "unsupported_field"


@pytest.mark.parametrize("name", sorted(UNSUPPORTABLE))
def test_what_is_honoured_passes(name: str) -> None:
    refuse_unsupported(spec_with(name), UNSUPPORTABLE - {name})


def test_what_is_not_asked_passes() -> None:
    refuse_unsupported(PLAIN, UNSUPPORTABLE)
