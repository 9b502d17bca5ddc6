"""A real model behind two servers, set up as the command line does."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import Struct

from dragoman.cli.engine import engine_of
from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.errors import SettingsError
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.engines.remote.support import serving
from tests.support.engines import RUNNER
from tests.support.http import HELLO, get, post

FRONT = Settings(port=0, store="none", shutdown_grace=0)


class Pair(Struct):
    inner: str
    outer: str


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """A server with the model, and one in front of it that has only the vocabulary."""
    options = LocalOptions(runner=RUNNER, context=256, slots=1, threads=1)
    with serving(LocalEngine.open(default_model(), options)) as urls:
        engine = engine_of(Settings(engine="remote", upstream=urls, tokenizer=str(default_model())))
        with background(engine, FRONT) as outer:
            yield Pair(urls[0], outer)


def chat(url: str, **fields: Any) -> dict[str, Any]:
    body = {**HELLO, "temperature": 0, "max_tokens": 6, "cache_prompt": False, **fields}
    answer: dict[str, Any] = post(url, "/v1/chat/completions", body).json()
    return answer


def test_the_same_ids_with_and_without_a_server_between(pair: Pair) -> None:
    direct, through = (chat(url, return_token_ids=True) for url in (pair.inner, pair.outer))
    assert through["prompt_token_ids"] == direct["prompt_token_ids"]
    assert through["choices"][0]["token_ids"] == direct["choices"][0]["token_ids"]
    assert through["choices"][0]["message"] == direct["choices"][0]["message"]
    assert through["usage"] == direct["usage"]


@pytest.mark.parametrize(
    ("field", "value", "may_be"),
    [
        ("guided_choice", ["red", "blue"], {"red", "blue"}),
        ("guided_regex", "x{3}", {"xxx"}),
        ("grammar", 'start: "yes" | "no"', {"yes", "no"}),
        ("guided_json", {"const": 7}, {"7"}),
    ],
)
def test_the_upstream_keeps_to_constraints(pair: Pair, field: str, value: Any, may_be: set[str]) -> None:
    assert chat(pair.outer, **{field: value})["choices"][0]["message"]["content"].strip() in may_be


@pytest.mark.parametrize("city", ["Oslo", "::="])
def test_a_call_that_must_be_is_made(pair: Pair, city: str) -> None:
    parameters = {"type": "object", "properties": {"city": {"const": city}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = chat(pair.outer, tools=[tool], tool_choice="required", max_tokens=60, parallel_tool_calls=False)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] == city


def test_the_model_is_listed_by_its_name(pair: Pair) -> None:
    inner, outer = (get(url, "/v1/models").json()["data"][0] for url in (pair.inner, pair.outer))
    assert (outer["id"], outer["max_model_len"]) == (inner["id"], inner["max_model_len"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs `upstream`"),
        ({"upstream": ["http://h"], "tokenizer": "t", "slots": 2}, "leave them out"),
        ({"upstream": ["http://h"], "tokenizer": "t", "engine_args": {"tires": 2}}, "tires"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        engine_of(Settings(engine="remote", **settings))
