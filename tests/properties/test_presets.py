"""What an operator says for all requests is what each of them would say itself."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dragoman.api.chat import request as chat_request
from dragoman.api.chat.request import ChatRequest, MessageBody
from dragoman.api.shared_fields import read_presets
from dragoman.engines.protocol import ModelCard
from dragoman.settings import Settings
from dragoman.turns.spec import defaults_of

CARD = ModelCard(
    name="m", max_model_len=8192, recommended_sampling={"temperature": 0.6, "top_k": 20}, has_samplers=True
)
share, token = st.floats(0, 1), st.integers(0, 255)
variables = st.dictionaries(st.sampled_from(["tone", "enable_thinking"]), st.booleans(), max_size=2)
fields = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": share,
        "top_k": st.integers(-1, 50),
        "min_p": share,
        "typical_p": share,
        "presence_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 2),
        "max_tokens": st.integers(1, 99),
        "seed": token,
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(token, max_size=2),
        "logit_bias": st.dictionaries(token.map(str), st.floats(-9, 9), max_size=2),
        "stop": st.lists(st.sampled_from("xyz"), max_size=2, unique=True),
        "bad_words": st.lists(st.sampled_from(["no", "never"]), max_size=2, unique=True),
        "xtc_probability": share,
        "dry_multiplier": st.sampled_from([0.0, 0.8]),
        "dry_sequence_breakers": st.just([";"]),
        "top_n_sigma": st.sampled_from([-1.0, 0.0, 1.5]),
        "temperature_last": st.booleans(),
        "chat_template_kwargs": variables,
        "enable_thinking": st.booleans(),
    },
)


def settled(said: dict[str, Any], **settings: Any) -> Sequence[Any]:
    """All that a turn has of what was said."""
    defaults = defaults_of(CARD, read_presets(Settings(**settings))[0])
    spec = defaults.apply(chat_request.spec(ChatRequest(messages=[MessageBody("user", "hi")], **said)))
    breakers = spec.dry_breakers if spec.sampling.samplers else ()
    return defaults.limit(spec.sampling), spec.prompts, spec.stop, spec.bad_words, breakers


@given(fields)
def test_a_request_that_says_nothing_says_what_the_operator_does(said: dict[str, Any]) -> None:
    assert settled({}, sampling=said) == settled(said)


@given(fields, fields)
def test_what_a_request_says_itself_counts(said: dict[str, Any], told: dict[str, Any]) -> None:
    assert settled(said, sampling=told) == settled(_over(told, said))


@given(fields, fields)
def test_what_is_decided_counts_whatever_a_request_says(said: dict[str, Any], told: dict[str, Any]) -> None:
    both = _over(said, told)
    for name in told.keys() & {"stop", "bad_words"}:
        both[name] = list(dict.fromkeys((*said.get(name, ()), *told[name])))
    assert settled(said, override=told) == settled(both)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Variables of the template count each by itself, however they are given."""
    variables = {**_variables(below), **_variables(above)}
    return {**below, **above, "enable_thinking": None, "chat_template_kwargs": variables}


def _variables(said: dict[str, Any]) -> dict[str, Any]:
    plain = {"enable_thinking": said["enable_thinking"]} if "enable_thinking" in said else {}
    return {**plain, **said.get("chat_template_kwargs", {})}
