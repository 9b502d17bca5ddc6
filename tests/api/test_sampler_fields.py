"""Samplers by the names that clients have for them."""

from typing import Any

import msgspec
import pytest

from dragoman.api import completions as completions_request
from dragoman.api.chat import request as chat_request
from dragoman.engines.protocol import ModelCard
from dragoman.errors import BadRequest
from dragoman.limits import Limits
from dragoman.turns.spec import defaults_of
from dragoman.types import SAMPLER_ORDER, ExtraSamplers, Sampling

NOTHING: dict[str, Any] = {
    "top_a": 0,
    "tfs": 1,
    "typical": 1,
    "mirostat": 0,
    "mirostat_mode": 0,
    "mirostat_tau": 1.5,
    "mirostat_eta": 0.3,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_range": 0,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n"],
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "min_temp": 1.0,
    "max_temp": 1.0,
    "temp_exponent": 1.0,
    "smoothing_factor": 0,
    "top_n_sigma": -1,
    "temperature_last": False,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "skew": 0,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
}


def sampling(**fields: Any) -> Sampling:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return chat_request.spec(chat_request.read(msgspec.json.encode(body), Limits())).sampling


def asked(**fields: Any) -> ExtraSamplers:
    samplers = sampling(**fields).samplers
    assert samplers is not None
    return samplers


@pytest.mark.parametrize("name", sorted(NOTHING))
def test_a_sampler_that_does_nothing_is_not_asked_for(name: str) -> None:
    assert sampling(**{name: NOTHING[name]}).samplers is None


@pytest.mark.parametrize("name", sorted(NOTHING))
def test_null_is_unset(name: str) -> None:
    assert sampling(**{name: None}).samplers is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_a", 0.2),
        ("tfs", 0.9),
        ("top_n_sigma", 1.0),
        ("xtc_probability", 0.5),
        ("mirostat", 2),
        ("dynatemp_range", 0.5),
        ("smoothing_factor", 0.2),
        ("dry_multiplier", 0.8),
    ],
)
def test_each_is_taken_by_its_name(field: str, value: float) -> None:
    assert getattr(asked(**{field: value}), field) == value


def test_tabbyapi_has_other_names() -> None:
    samplers = asked(mirostat_mode=1, dry_range=64, dry_multiplier=1)
    assert (samplers.mirostat, samplers.dry_range) == (1, 64)
    assert sampling(typical=0.5).typical_p == 0.5


def test_two_temperatures_are_a_range() -> None:
    result = sampling(min_temp=0.5, max_temp=1.5, temp_exponent=2)
    assert result.temperature == 1.0
    assert result.samplers == ExtraSamplers(dynatemp_range=0.5, dynatemp_exponent=2)


@pytest.mark.parametrize("given", [["dry", "top_k", "typ_p"], "dry;top_k;typical_p", "dky"])
def test_an_order_is_given_in_three_ways(given: list[str] | str) -> None:
    assert asked(samplers=given).order == ("dry", "top_k", "typical_p")


def test_an_order_of_text_generation_webui() -> None:
    """Its names, as SillyTavern sends them: several for one of ours, and some for what is off here."""
    texts = [
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "dry", "temperature"),
        *("dynamic_temperature", "quadratic_sampling", "top_n_sigma", "top_k", "top_p", "typical_p"),
        *("epsilon_cutoff", "eta_cutoff", "tfs", "top_a", "min_p", "adaptive_p", "mirostat", "xtc"),
        *("encoder_repetition_penalty", "no_repeat_ngram"),
    ]
    items = asked(sampler_priority=texts).order
    assert items[:5] == ("penalties", "dry", "temperature", "smoothing", "top_n_sigma")
    assert items[5:] == ("top_k", "top_p", "typical_p", "tfs", "top_a", "min_p", "xtc")
    assert asked(samplers=["dry", "top_p_top_k"]).order == ("dry", "top_k", "top_p")


def test_temperature_last_is_so_in_any_order() -> None:
    assert asked(samplers=["temperature", "top_k"], temperature_last=True).order == ("top_k", "temperature")
    assert asked(samplers=["top_p", "top_k"], temperature_last=True).order == ("top_p", "top_k")
    assert sampling(temperature_last=False).samplers is None


def test_temperature_last_keeps_the_rest() -> None:
    order = asked(temperature_last=True).order
    assert order[-1] == "temperature"
    assert set(order) == set(SAMPLER_ORDER)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"samplers": ["top_q"]}, "samplers"),
        ({"samplers": ["top_k", "top_k"]}, "samplers"),
        ({"samplers": ["top_k", "dry"]}, "samplers"),
        ({"sampler_priority": ["x" * 64]}, "sampler_priority"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 1.2}, "length_penalty"),
        ({"skew": 0.5}, "skew"),
        ({"adaptive_target": 0.5}, "adaptive_target"),
        ({"mirostat": 3}, "mirostat"),
        ({"dry_multiplier": 1, "dry_base": 0.5}, "dry_base"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]"),
        ({"min_temp": 1.0, "max_temp": 0.5}, "max_temp"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        sampling(**fields)
    assert caught.value.param == param


def test_breakers_are_those_of_llama_cpp_where_none_are_given() -> None:
    body = msgspec.json.encode({"prompt": "hi", "dry_multiplier": 1})
    spec = completions_request.spec(completions_request.read(body, Limits()))
    turn_spec = defaults_of(ModelCard(name="m", max_model_len=9)).apply(spec)
    assert turn_spec.dry_breakers == ("\n", ":", '"', "*")
