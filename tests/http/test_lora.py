"""Adapters by request: in `model`, in `lora`, and on every API alike."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Adapters
from tests.http.conftest import RunningServer, Serve
from tests.support.http import HELLO, get_json, post, refusal

APIS = {
    "/v1/chat/completions": HELLO,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}


def adapted(*, mixes: bool = True) -> ScriptedEngine:
    card = ModelCard(
        name="scripted",
        max_model_len=4096,
        templates={"default": CHATML},
        adapters=("poet", "clerk"),
        combines_adapters=mixes,
    )
    return ScriptedEngine(say("hi"), card=card)


@pytest.fixture(scope="module")
def mixer() -> Iterator[RunningServer]:
    engine = adapted()
    with background(engine, Settings(port=0)) as url:
        yield RunningServer(engine, url)


def asked(url: str, lora: Any, **more: object) -> httpx.Response:
    return post(url, "/v1/chat/completions", {**HELLO, "lora": lora, **more})


def test_the_models_list_names_their_parent_and_number(mixer: RunningServer) -> None:
    _, *adapters = get_json(mixer.url, "/v1/models")["data"]
    assert [(model["id"], model["parent"], model["lora_id"]) for model in adapters] == [
        ("poet", "scripted", 0),
        ("clerk", "scripted", 1),
    ]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("fields", "adapters"),
    [
        ({}, ()),
        ({"model": "poet"}, (("poet", 1.0),)),
        ({"lora": "poet"}, (("poet", 1.0),)),
        ({"lora": [{"id": 1, "scale": 0.5}]}, (("clerk", 0.5),)),
        ({"lora": [{"name": "poet", "scale": 2}, {"name": "clerk"}]}, (("clerk", 1.0), ("poet", 2.0))),
        ({"lora": [{"name": "poet", "scale": 0}]}, ()),
        ({"lora": [], "model": "scripted"}, ()),
    ],
)
def test_the_engine_is_told(
    mixer: RunningServer, path: str, fields: dict[str, Any], adapters: Adapters
) -> None:
    assert post(mixer.url, path, {**APIS[path], **fields}).status_code == 200
    assert mixer.engine.jobs[-1].adapters == adapters


@pytest.mark.parametrize(
    ("lora", "place"),
    [
        ("monk", "lora"),
        ([{"name": "poet"}, {"name": "monk"}], "lora[1]"),
        ([{"id": 2}], "lora[0]"),
        ([{"name": "poet"}, {"id": 0}], "lora[1]"),
        ([{}], "lora[0]"),
        ([{"name": "poet", "id": 0}], "lora[0]"),
        ([{"name": "poet", "scale": "much"}], "lora[0].scale"),
        ([{"name": "poet", "scale": 1e30}], "lora[0].scale"),
        ([{"name": "poet", "weight": 1}], "lora[0].weight"),
        ({"name": "poet"}, "lora"),
    ],
)
def test_what_is_wrong_is_named(mixer: RunningServer, lora: Any, place: str) -> None:
    assert refusal(asked(mixer.url, lora)) == (400, place)


@pytest.mark.parametrize("scale", ["NaN", "Infinity", "1e999"])
def test_a_scale_is_a_finite_number(mixer: RunningServer, scale: str) -> None:
    body = b'{"prompt": "hi", "lora": [{"name": "poet", "scale": %s}]}' % scale.encode()
    assert httpx.post(mixer.url + "/v1/completions", content=body).status_code == 400


def test_an_adapter_in_model_and_in_lora_is_one_too_many(mixer: RunningServer) -> None:
    assert refusal(asked(mixer.url, "poet", model="clerk")) == (400, "lora")


@pytest.mark.parametrize(
    ("lora", "place"),
    [([{"name": "poet"}, {"name": "clerk"}], "lora"), ([{"name": "poet", "scale": 0.5}], "lora[0].scale")],
)
def test_an_engine_that_does_not_mix_is_not_asked_to(serve: Serve, lora: Any, place: str) -> None:
    url = serve(adapted(mixes=False))
    assert refusal(asked(url, lora)) == (400, place)
    assert asked(url, [{"name": "poet"}, {"name": "clerk", "scale": 0}]).status_code == 200
