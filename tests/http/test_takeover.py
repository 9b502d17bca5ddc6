"""Two servers on one store: what one that was killed had promised is made by the other."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, ScriptedEngine, say
from dragoman.http.routes import responses
from dragoman.http.server import background
from dragoman.responses import manager
from dragoman.settings import Settings
from tests.support.http import get, post
from tests.support.wait import becomes

STUCK = """
import sys
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
with background(ScriptedEngine(say("x", fault="hang")), Settings(port=0, data_dir=sys.argv[1])) as url:
    print(url, flush=True)
    sys.stdin.read()
"""
ASKED = {
    "model": "scripted",
    "input": "Say it.",
    "background": True,
    "instructions": "Be kind.",
    "temperature": 0,
    "metadata": {"a": "b"},
}


@contextmanager
def mortal(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """A server in a process of its own, whose engine never answers."""
    command = [sys.executable, "-c", STUCK, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def ended(url: str, id_: str) -> dict[str, Any]:
    until = time.monotonic() + 60
    while (body := get(url, f"/v1/responses/{id_}").json())["status"] in ("queued", "in_progress"):
        assert time.monotonic() < until
        time.sleep(0.05)
    return dict(body)


def settings_of(folder: Path) -> Settings:
    return Settings(port=0, data_dir=str(folder), shutdown_grace=0)


def test_another_server_makes_what_a_killed_one_had_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(responses, "LOOK_ELSEWHERE_S", 0.01)
    engine, settings = ScriptedEngine(say("said")), replace(settings_of(tmp_path), keep_alive=0.02)
    with mortal(tmp_path) as (url, process), background(engine, settings) as other:
        promised = post(url, "/v1/responses", ASKED).json()
        assert promised["status"] == "queued"
        # While its server lives nobody else touches it.
        assert get(other, f"/v1/responses/{promised['id']}").json()["status"] == "queued"
        where = f"{other}/v1/responses/{promised['id']}"
        with httpx.stream("GET", where, params={"stream": "true"}, timeout=60) as followed:
            lines = followed.iter_lines()
            assert next(lines).startswith(":")
            process.kill()
            events = [line for line in lines if line.startswith("event: ")]
        fields = ended(other, promised["id"])
    assert (events[0], events[-1]) == ("event: response.created", "event: response.completed")
    assert fields["status"] == "completed"
    assert fields["output"][0]["content"][0]["text"] == "said"
    kept = ("id", "created_at", "instructions", "metadata", "background", "temperature")
    assert {name: fields[name] for name in kept} == {name: promised[name] for name in kept}


def test_it_is_cancelled_at_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "POLL_INTERVAL_S", 0.05)
    engine = ScriptedEngine(say("x", fault="hang"))
    with (
        background(engine, settings_of(tmp_path)) as url,
        background(ScriptedEngine(say("said")), settings_of(tmp_path)) as other,
    ):
        id_ = post(url, "/v1/responses", ASKED).json()["id"]
        assert becomes(lambda: engine.live == 1)
        assert post(other, f"/v1/responses/{id_}/cancel", {}).json()["status"] == "cancelled"
        assert becomes(lambda: engine.live == 0)
        assert becomes(lambda: get(url, f"/v1/responses/{id_}").json()["status"] == "cancelled")


def test_a_server_that_comes_back_makes_what_it_had_promised(tmp_path: Path) -> None:
    with mortal(tmp_path) as (url, process):
        promised = post(url, "/v1/responses", ASKED).json()
        process.kill()
        process.wait()
    with background(ScriptedEngine(say("said")), settings_of(tmp_path)) as again:
        assert ended(again, promised["id"])["status"] == "completed"


def test_it_is_left_to_a_server_that_has_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "POLL_INTERVAL_S", 0.05)
    card = ModelCard(name="other", max_model_len=4096, templates={"default": CHATML})
    with mortal(tmp_path) as (url, process):
        promised = post(url, "/v1/responses", ASKED).json()
        process.kill()
        process.wait()
    with background(ScriptedEngine(say("no"), card=card), settings_of(tmp_path)) as other:
        assert get(other, f"/v1/responses/{promised['id']}").json()["status"] == "queued"
        with background(ScriptedEngine(say("said")), settings_of(tmp_path)) as again:
            fields = ended(again, promised["id"])
    assert (fields["status"], fields["output"][0]["content"][0]["text"]) == ("completed", "said")


def test_a_response_whose_model_nobody_has_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "ELSEWHERE_S", -1.0)
    card = ModelCard(name="other", max_model_len=4096, templates={"default": CHATML})
    with mortal(tmp_path) as (url, process):
        promised = post(url, "/v1/responses", ASKED).json()
        process.kill()
        process.wait()
    with background(ScriptedEngine(say("no"), card=card), settings_of(tmp_path)) as other:
        assert ended(other, promised["id"])["status"] == "failed"


def test_a_response_that_kills_servers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "TRIES", 1)
    with mortal(tmp_path) as (url, process):
        promised = post(url, "/v1/responses", ASKED).json()
        process.kill()
        process.wait()
    with background(ScriptedEngine(say("said")), settings_of(tmp_path)) as again:
        fields = ended(again, promised["id"])
    assert (fields["status"], fields["error"]["code"]) == ("failed", "server_error")
