"""A field that the engine does not honour is refused, and only then."""

from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.engines.protocol import OPTIONAL_FIELDS, ModelCard
from dragoman.errors import BadRequest, ParamKey
from dragoman.turns.spec import TurnSpec, refuse_unsupported
from dragoman.types import ExtraSamplers, Sampling, TextPrompt

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


def card(unsupported: frozenset[str], *, has_samplers: bool = False) -> ModelCard:
    return ModelCard(name="m", max_model_len=64, unsupported=unsupported, has_samplers=has_samplers)


def spec_with(name: str) -> TurnSpec:
    if name in SAMPLING:
        return replace(PLAIN, sampling=replace(PLAIN.sampling, **{name: SAMPLING[name]}))
    return replace(PLAIN, **{name: OTHERS[name]})


def test_every_field_can_be_refused() -> None:
    assert SAMPLING.keys() | OTHERS.keys() == OPTIONAL_FIELDS


@pytest.mark.parametrize("name", sorted(OPTIONAL_FIELDS))
def test_what_is_asked_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        refuse_unsupported(spec_with(name), card(frozenset({name})))
    assert (caught.value.param, caught.value.code) == (ParamKey(name), "unsupported_field")
    assert f"'{name}'" in caught.value.message


@pytest.mark.parametrize("name", sorted(OPTIONAL_FIELDS))
def test_what_is_honoured_passes(name: str) -> None:
    refuse_unsupported(spec_with(name), card(OPTIONAL_FIELDS - {name}))


def test_what_is_not_asked_passes() -> None:
    refuse_unsupported(PLAIN, card(OPTIONAL_FIELDS))


SAMPLERS = replace(PLAIN, sampling=replace(PLAIN.sampling, samplers=ExtraSamplers(top_a=0.1)))


def test_samplers_are_refused_where_the_engine_has_none() -> None:
    with pytest.raises(BadRequest, match="supports only the common samplers"):
        refuse_unsupported(SAMPLERS, card(frozenset()))


def test_samplers_pass_where_the_engine_has_them() -> None:
    refuse_unsupported(SAMPLERS, card(frozenset(), has_samplers=True))
