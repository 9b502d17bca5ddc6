"""Law 4 beyond one process: what goes on from a stored answer goes on from its ids, whoever made it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, END_ID, ScriptedEngine
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.http import post
from tests.support.scripted_server import HELLO_ID, one_id

ROOT = Path(__file__).parents[2]
Going = Callable[[dict[str, Any]], dict[str, Any]]
"""How the next request says what it goes on from, given the last response."""


def by_chain(_: str) -> Going:
    return lambda last: {"previous_response_id": last["id"]} if last else {}


def by_conversation(url: str) -> Going:
    talk = post(url, "/v1/conversations", {}).json()["id"]
    return lambda _: {"conversation": talk}


def by_conversation_alone(url: str) -> Going:
    """The responses themselves are not stored."""
    going_on = by_conversation(url)
    return lambda last: {**going_on(last), "store": False}


@contextmanager
def killed(folder: Path) -> Iterator[str]:
    """A server of its own process, which is killed at the end."""
    command = [sys.executable, "-m", "tests.support.scripted_server", str(folder), "one-id"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.kill()


def asked(url: str, **fields: Any) -> dict[str, Any]:
    reply = post(url, "/v1/responses", {"input": "hi", **fields})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


@pytest.mark.parametrize("way", [by_chain, by_conversation, by_conversation_alone])
def test_a_server_that_was_killed_goes_on_from_the_ids(tmp_path: Path, way: Callable[[str], Going]) -> None:
    with killed(tmp_path) as url:
        going_on = way(url)
        last = asked(url, **going_on({}))
    with killed(tmp_path) as url:
        last = asked(url, **going_on(last))
    engine = one_id()
    with background(engine, Settings(port=0, data_dir=str(tmp_path))) as url:
        asked(url, **going_on(last))
    assert sampled(engine) == [(HELLO_ID, END_ID)] * 2


def sampled(engine: ScriptedEngine) -> list[tuple[int, ...]]:
    """The answers that the last prompt holds as they were sampled."""
    prompt = engine.jobs[-1].prompt
    return [prompt[offset : offset + 2] for offset, id_ in enumerate(prompt) if id_ == HELLO_ID]


@pytest.mark.parametrize("way", [by_chain, by_conversation])
def test_servers_on_one_database_go_on_from_each_others_ids(
    postgres_url: str, way: Callable[[str], Going]
) -> None:
    engines, settings = (one_id(), one_id()), Settings(port=0, store=postgres_url)
    with ExitStack() as stack:
        urls = [stack.enter_context(background(engine, settings)) for engine in engines]
        going_on = way(urls[0])
        last: dict[str, Any] = {}
        for turn in range(4):
            last = asked(urls[turn % 2], **going_on(last))
            assert sampled(engines[turn % 2]) == [(HELLO_ID, END_ID)] * turn


def test_a_trajectory_goes_on_after_a_restart(tmp_path: Path) -> None:
    settings = Settings(port=0, data_dir=str(tmp_path), trajectories=True)
    with background(one_id(), settings) as url:
        first = asked(url)
    with background(one_id(), settings) as url:
        second = asked(url, previous_response_id=first["id"])
        shown = httpx.get(f"{url}/v1/trajectories/{second['id']}").json()
    (segment,) = shown["segments"]
    assert segment["answers"] == [first["id"], second["id"]]
    assert sum(segment["mask"]) == 4


def test_another_model_is_not_given_ids_that_mean_something_else(tmp_path: Path) -> None:
    settings = Settings(port=0, data_dir=str(tmp_path))
    with background(one_id(), settings) as url:
        first = asked(url)
    other = one_id()
    other.card = ModelCard(name="other", max_model_len=4096, templates={"default": CHATML})
    with background(other, settings) as url:
        asked(url, previous_response_id=first["id"])
    assert sampled(other) == []
