"""What holds where a request says nothing, and what holds whatever it says."""

from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.api.chat import request as chat_request
from dragoman.api.chat.request import ChatRequest, MessageBody
from dragoman.api.shared_fields import read_presets
from dragoman.engines.protocol import ModelCard
from dragoman.errors import SettingsError
from dragoman.settings import PresetSettings, Settings
from dragoman.turns.spec import BREAKERS, PresetPair, TurnSpec, defaults_of
from dragoman.types import Conversation, ExtraSamplers, Sampling, TextPrompt


def card(**fields: Any) -> ModelCard:
    mapping = {"max_model_len": 8192, "recommended_sampling": {"temperature": 0.6, "top_k": 20}, **fields}
    return ModelCard(name="m", **mapping)


def spec(chosen: set[str] | None = None, **sampling: Any) -> TurnSpec:
    asked = Sampling(**{"max_tokens": 0, **sampling})
    return TurnSpec(model=None, prompts=(TextPrompt("hi"),), sampling=asked, chosen=frozenset(chosen or ()))


def told(**fields: Any) -> PresetPair:
    return read_presets(Settings(**fields))[0]


def settled(card: ModelCard, asked: TurnSpec, **fields: Any) -> Sampling:
    defaults = defaults_of(card, told(**fields))
    return defaults.limit(defaults.apply(asked).sampling)


def test_the_model_speaks_where_the_client_does_not() -> None:
    sampling = settled(card(), spec({"top_k"}, top_k=3))
    assert (sampling.temperature, sampling.top_k) == (0.6, 3)


def test_a_whole_number_stays_whole_on_its_way_through_another_process() -> None:
    assert isinstance(settled(card(recommended_sampling={"top_k": 20.0}), spec()).top_k, int)


def test_the_operator_speaks_before_the_model() -> None:
    sampling = settled(card(), spec(), sampling={"temperature": 0.1})
    assert (sampling.temperature, sampling.top_k) == (0.1, 20)


def test_what_is_trained_on_is_the_distribution_of_the_model() -> None:
    sampling = defaults_of(card(), told(sampling={"top_p": 0.9}), exact=True).apply(spec()).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 0.9)


def test_an_engine_is_not_asked_for_what_it_cannot_do() -> None:
    assert settled(card(unsupported=frozenset({"top_k"})), spec()).top_k == 0


@pytest.mark.parametrize("field", ["sampling", "override"])
@pytest.mark.parametrize("wanted", [{"top_k": 3}, {"xtc_probability": 0.5}])
def test_an_operator_hears_at_the_start_what_the_engine_cannot_do(field: str, wanted: dict[str, Any]) -> None:
    (name,) = wanted
    with pytest.raises(SettingsError, match=name):
        defaults_of(card(unsupported=frozenset({"top_k"})), told(**{field: wanted}))


@pytest.mark.parametrize(("context", "most"), [(4096, 2048), (32768, 8192), (1 << 20, 16384)])
def test_an_answer_without_a_limit_ends(context: int, most: int) -> None:
    assert settled(card(max_model_len=context), spec()).max_tokens == most


def test_the_length_is_the_operators_too() -> None:
    assert settled(card(), spec(), sampling={"max_tokens": 100}).max_tokens == 100


def test_the_length_is_not_less_than_what_is_asked_at_least() -> None:
    assert settled(card(), spec(min_tokens=200), sampling={"max_tokens": 100}).max_tokens == 200


def test_an_override_holds_whatever_the_client_says() -> None:
    asked = spec({"temperature", "top_k"}, temperature=1.5, top_k=7, max_tokens=500, min_tokens=400)
    sampling = settled(card(), asked, override={"temperature": 0.2, "max_tokens": 100})
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.min_tokens) == (
        0.2,
        7,
        100,
        100,
    )


def test_stop_strings_are_the_clients_or_the_operators() -> None:
    defaults = defaults_of(card(), told(sampling={"stop": ["a"]}, override={"stop": "b"}))
    assert defaults.apply(spec()).stop == ("a", "b")
    assert defaults.apply(replace(spec({"stop"}), stop=("c", "b"))).stop == ("c", "b")
    assert defaults.apply(spec({"stop"})).stop == ("b",)


def test_each_variable_of_the_template_counts_by_itself() -> None:
    fields = {"enable_thinking": False, "chat_template_kwargs": {"tone": "dry", "date": "now"}}
    pair = told(sampling=fields, override={"chat_template_kwargs": {"date": "then"}})
    asked = Conversation(messages=(), template_kwargs={"tone": "warm", "date": "soon", "more": 1})
    prompt = defaults_of(card(), pair).settle_prompt(asked)
    assert isinstance(prompt, Conversation)
    assert prompt.template_kwargs == {"enable_thinking": False, "tone": "warm", "date": "then", "more": 1}


def test_a_sampler_that_a_client_has_switched_off_stays_off() -> None:
    able, fields = card(has_samplers=True), {"xtc_probability": 0.5, "dry_multiplier": 0.8}
    asked = chat_request.spec(ChatRequest(messages=[MessageBody("user", "hi")], xtc_probability=0.0))
    defaults = defaults_of(able, told(sampling=fields))
    turn_spec = defaults.apply(asked)
    assert turn_spec.sampling.samplers == ExtraSamplers(dry_multiplier=0.8)
    assert turn_spec.dry_breakers == BREAKERS


def test_what_is_said_of_one_name_counts_more_than_what_is_said_of_all() -> None:
    general, named = read_presets(
        Settings(
            sampling={"temperature": 0.1, "top_p": 0.5, "stop": "x"},
            presets={"poet": PresetSettings(sampling={"temperature": 1.1}, override={"stop": ["y"]})},
        )
    )
    pair = named["poet"].over(general)
    assert pair.defaults.sampling == {"temperature": 1.1, "top_p": 0.5}
    assert (pair.defaults.lists, pair.overrides.lists) == ({"stop": ("x",)}, {"stop": ("y",)})


@pytest.mark.parametrize(
    "wrong",
    [
        {"warmth": 1},
        {"temperature": "hot"},
        {"top_p": 2},
        {"max_tokens": 0},
        {"stop": ""},
        {"n": 2},
        {"chat_template_kwargs": {"messages": []}},
    ],
)
@pytest.mark.parametrize("field", ["sampling", "override"])
def test_what_is_no_sampling_is_refused(field: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"`{field}`"):
        told(**{field: wrong})
    with pytest.raises(SettingsError, match=f"`presets.poet.{field}`"):
        told(presets={"poet": {field: wrong}})
