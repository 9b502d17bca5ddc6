"""What holds where a request says nothing of how to sample."""

from typing import Any

import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.errors import SettingsError
from dragoman.turns.spec import TurnSpec, defaults_of
from dragoman.types import Sampling, TextPrompt


def card(**fields: Any) -> ModelCard:
    told = {"max_model_len": 8192, "sampling": {"temperature": 0.6, "top_k": 20}, **fields}
    return ModelCard(name="m", **told)


def spec(chosen: set[str] | None = None, **sampling: Any) -> TurnSpec:
    asked = Sampling(**{"max_tokens": 0, **sampling})
    return TurnSpec(model=None, prompts=(TextPrompt("hi"),), sampling=asked, chosen=frozenset(chosen or ()))


def test_the_model_speaks_where_the_client_does_not() -> None:
    applied = defaults_of(card(), {}).applied(spec({"top_k"}, top_k=3))
    assert (applied.temperature, applied.top_k) == (0.6, 3)


def test_a_whole_number_stays_whole_on_its_way_through_another_process() -> None:
    applied = defaults_of(card(sampling={"top_k": 20.0}), {}).applied(spec())
    assert isinstance(applied.top_k, int)


def test_the_operator_speaks_before_the_model() -> None:
    applied = defaults_of(card(), {"temperature": 0.1}).applied(spec())
    assert (applied.temperature, applied.top_k) == (0.1, 20)


def test_what_is_trained_on_is_the_distribution_of_the_model() -> None:
    applied = defaults_of(card(), {"top_p": 0.9}, exact=True).applied(spec())
    assert (applied.temperature, applied.top_k, applied.top_p) == (1.0, 0, 0.9)


def test_an_engine_is_not_asked_for_what_it_cannot_do() -> None:
    applied = defaults_of(card(unsupported=frozenset({"top_k"})), {}).applied(spec())
    assert applied.top_k == 0


@pytest.mark.parametrize(("context", "most"), [(4096, 2048), (32768, 8192), (1 << 20, 16384)])
def test_an_answer_without_a_limit_ends(context: int, most: int) -> None:
    assert defaults_of(card(max_model_len=context), {}).applied(spec()).max_tokens == most


def test_the_length_is_the_operators_too() -> None:
    assert defaults_of(card(), {"max_tokens": 100}).applied(spec()).max_tokens == 100


def test_the_length_is_not_less_than_what_is_asked_at_least() -> None:
    assert defaults_of(card(), {"max_tokens": 100}).applied(spec(min_tokens=200)).max_tokens == 200


@pytest.mark.parametrize("wrong", [{"warmth": 1}, {"temperature": "hot"}, {"top_p": 2}, {"max_tokens": 0}])
def test_what_is_no_sampling_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="sampling"):
        defaults_of(card(), wrong)
