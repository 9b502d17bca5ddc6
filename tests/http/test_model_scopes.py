"""A key for some models: the others are not there for it, whatever API it asks through."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, ScriptedEngine, say
from dragoman.http.key_file import add_key, describe_key
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.http import HELLO, get, post

KEY, ADMIN = "sk-some-0123456789-0123456789", "sk-admin-0123456789-0123456789"
MINE, SECRET = "shared", "secret-model"


class EmbeddingEngine(ScriptedEngine):
    async def embed(self, prompts: Any) -> list[list[float]]:
        return [[1.0, 2.0] for _ in prompts]


def engine(name: str) -> ScriptedEngine:
    return EmbeddingEngine(
        say("hi"), card=ModelCard(name=name, max_model_len=512, templates={"default": CHATML})
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    add_key(str(file), describe_key(KEY, name="some", models=["share*"]))
    add_key(str(file), describe_key(ADMIN, name="all", models=["nothing"], admin=True))
    settings = Settings(port=0, store="memory", api_key_file=str(file))
    with background({SECRET: engine(SECRET), MINE: engine(MINE)}, settings) as text:
        yield text


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", HELLO),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {**HELLO, "max_tokens": 5}),
    ("/v1/messages/count_tokens", HELLO),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {}}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v1/chat/completions/render", HELLO),
    ("/api/chat", {**HELLO, "stream": False}),
    ("/api/generate", {"prompt": "hi", "stream": False}),
    ("/api/embed", {"input": "hi"}),
    ("/api/show", {}),
]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=[path for path, _ in ASKED])
def test_another_model_is_not_there(url: str, path: str, body: dict[str, Any]) -> None:
    def ask(model: str, key: str = KEY) -> httpx.Response:
        return post(url, path, {**body, "model": model}, **{"x-api-key": key})

    assert ask(MINE).status_code == 200
    assert ask(SECRET, ADMIN).status_code == 200
    refused, unknown = ask(SECRET), ask("no-such-model")
    assert refused.status_code == unknown.status_code == 404
    # What is there for others is told in no other way than what is not there.
    assert refused.text == unknown.text
    assert SECRET not in unknown.text


@pytest.mark.parametrize("path", ["/v1/models", "/api/tags", "/api/ps", "/ready"])
def test_lists_have_what_the_key_may_use(url: str, path: str) -> None:
    assert SECRET not in get(url, path, **{"x-api-key": KEY}).text
    assert SECRET in get(url, path, **{"x-api-key": ADMIN}).text


def test_one_model_is_looked_at_by_those_who_may_use_it(url: str) -> None:
    assert get(url, f"/v1/models/{MINE}", **{"x-api-key": KEY}).status_code == 200
    assert get(url, f"/v1/models/{SECRET}", **{"x-api-key": KEY}).status_code == 404
    assert get(url, f"/v1/models/{SECRET}", **{"x-api-key": ADMIN}).status_code == 200


def test_a_socket_has_the_models_of_its_key(url: str) -> None:
    items = []
    with connect(url.replace("http", "ws") + "/v1/responses", additional_headers={"x-api-key": KEY}) as talk:
        for model in (SECRET, "no-such-model"):
            talk.send(json.dumps({"type": "response.create", "input": "hi", "model": model}))
            items.append(json.loads(talk.recv(timeout=30)))
    assert items[0]["type"] == "error" and items[0]["status"] == 404
    assert items[0] == items[1]


def test_who_names_no_model_has_the_default_if_it_may(url: str) -> None:
    assert post(url, "/v1/chat/completions", HELLO, **{"x-api-key": KEY}).status_code == 404
    assert post(url, "/v1/chat/completions", HELLO, **{"x-api-key": ADMIN}).status_code == 200
