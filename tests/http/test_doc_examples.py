"""Every operation of the OpenAPI document has an example, and every example works on a real server."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest

from dragoman.api.openapi import Operation
from dragoman.engines.scripted import Script, ScriptedEngine, say
from dragoman.http.routes.table import operations
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job
from tests.support.http import get, send


def _answer(job: Job) -> Script:
    """What a batch is made of takes a while: one that is over cannot be cancelled."""
    return say("Red. " * 40) if job.sampling.max_tokens > 256 else say("Red.")


class _Engine(ScriptedEngine):
    """One that can do all that there are operations for."""

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[1.0, float(len(ids))] for ids in prompts]

    async def load_adapter(self, name: str, path: str) -> None:
        pass

    async def unload_adapter(self, name: str) -> None:
        pass


def make_able_engine() -> ScriptedEngine:
    return _Engine(_answer, interval=0.001)


MANAGING = frozenset(
    {
        *("post /models/load", "post /models/unload", "post /v1/model/load", "post /v1/model/unload"),
        *("post /api/copy", "delete /api/delete", "get /models/sse"),
    }
)
"""They change which models there are, which takes an admin key; and one has no end."""
EXAMPLES = {name: each for each in operations() if (name := f"{each.method} {each.path}") not in MANAGING}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "poet").mkdir()
    settings = Settings(port=0, store="memory", lora_dir=str(folder), files_dir=str(folder / "files"))
    with background(make_able_engine(), settings) as text:
        yield text


@pytest.fixture(scope="module")
def document(url: str) -> Any:
    return get(url, "/openapi.json").json()


@pytest.fixture(scope="module")
def known(url: str) -> dict[str, str]:
    return {"MODEL": get(url, "/v1/models").json()["data"][0]["id"]}


def test_what_needs_an_example_has_one(document: Any) -> None:
    lacking = []
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            bodies = list(described.get("requestBody", {}).get("content", {}).values())
            fields = [each for each in described.get("parameters", ()) if each["in"] == "path"]
            if any(each.get("example") is None for each in (*bodies, *fields)):
                lacking.append(f"{method} {path}")
    assert not lacking


@pytest.mark.parametrize("operation", EXAMPLES.values(), ids=EXAMPLES)
def test_the_example_works(url: str, document: Any, known: dict[str, str], operation: Operation) -> None:
    described = document["paths"][operation.path][operation.method]
    words = dict(known)
    for step in described.get("x-before", ()):
        prepare(url, step, words)
    content = described.get("requestBody", {}).get("content", {})
    body = content.get("application/json", {}).get("example")
    form = content.get("multipart/form-data", {}).get("example")
    path, query = operation.path, {}
    for field in described.get("parameters", ()):
        if field["in"] == "path":
            path = path.replace(f"{{{field['name']}}}", filled(field["example"], words))
        elif "example" in field:
            query[field["name"]] = field["example"]
    reply = sent(url, operation.method, path, filled(body, words), form, query)
    assert reply.status_code == 200, reply.text
    if operation.path == "/v1/engine/pause":
        send("POST", url, "/v1/engine/resume", json={})


def prepare(url: str, step: dict[str, Any], words: dict[str, str]) -> None:
    for _ in range(200):
        method, path = step.get("method", "post"), filled(step["path"], words)
        form = filled(step.get("form"), words)
        reply = sent(url, method, path, filled(step.get("body"), words), form)
        assert reply.status_code == 200, reply.text
        if all(reply.json()[name] == value for name, value in step.get("until", {}).items()):
            break
        time.sleep(0.05)
    for word, position in step.get("take", {}).items():
        value = reply.json()
        for name in position.split("."):
            value = value[int(name) if name.isdigit() else name]
        words[word] = value


def sent(
    url: str,
    method: str,
    path: str,
    body: Any,
    form: Mapping[str, Any] | None,
    query: Mapping[str, str] | None = None,
) -> httpx.Response:
    if form is None:
        more = {} if body is None else {"json": body}
        return send(method.upper(), url, path, params=query or {}, **more)
    files = {name: (each["name"], each["content"]) for name, each in form.items() if isinstance(each, dict)}
    data = {name: each for name, each in form.items() if isinstance(each, str)}
    return send("POST", url, path, data=data, files=files)


def filled(value: Any, words: Mapping[str, str]) -> Any:
    """With what the words in capitals stand for: as values, as parts of a path, and in quotes in a file."""
    if isinstance(value, dict):
        return {name: filled(each, words) for name, each in value.items()}
    if isinstance(value, list):
        return [filled(each, words) for each in value]
    if not isinstance(value, str):
        return value
    for word, meant in words.items():
        value = value.replace(f'"{word}"', json.dumps(meant))
    return "/".join(words.get(part, part) for part in value.split("/"))
