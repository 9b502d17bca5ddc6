"""Engines that die, crash in native code or hang while they serve: told at once, and healed. Rows 12, 64, 65.

How fast that is, `python -m tests.torture engine_crashes` measures.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.llamacpp import LlamaRunner
from dragoman.engines.supervisor import SupervisedEngine
from dragoman.errors import ModelFileError
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.crashes import KILLS, Server, crash, isolated_server
from tests.support.http import HELLO, get, get_json, post
from tests.support.wait import becomes

LISTEN = "0A"
"""A state of a socket, as the kernel writes it."""


@pytest.fixture(scope="module", autouse=True)
def weights() -> None:
    try:
        default_model()
    except ModelFileError as error:
        pytest.skip(f"THE DEFAULT WEIGHTS CANNOT BE FETCHED, so nothing of the real model is tested: {error}")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with isolated_server("--slots", "2") as result:
        yield result


@pytest.mark.parametrize("number", KILLS, ids=lambda number: number.name)
def test_a_process_that_is_killed_segfaults_or_stops(server: Server, number: object) -> None:
    """Two answers are being written and two wait; what was stored before is there after it."""
    stored = post(server.url, "/v1/responses", {"input": "hi", "max_output_tokens": 16}).json()
    before = server.engine
    seen = crash(server, number, streams=4)  # type: ignore[arg-type]
    assert (seen.untold, len(seen.ends)) == (0, 4)
    assert server.engine not in (before, None)
    assert get(server.url, "/health").status_code == 200
    assert get_json(server.url, f"/v1/responses/{stored['id']}")["output"] == stored["output"]


def sockets(pid: int) -> set[str]:
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]


def test_nothing_but_the_port_can_be_connected_to(server: Server) -> None:
    """Rows 64 and 71: the link to the engine is a pair of sockets without a name."""
    assert server.engine is not None
    ours, engines = sockets(server.pid), sockets(server.engine)
    listening = {row[9] for table in ("tcp", "tcp6") for row in rows(table) if row[3] == LISTEN}
    named = {row[6] for row in rows("unix") if len(row) > 7}
    assert len(listening & ours) == 1
    assert not listening & engines
    assert engines
    assert not named & (ours | engines)


def test_an_exception_in_the_engines_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 12: a step of the embedded engine raises an unforeseen error, and later every step does."""
    step, broken, dead = LlamaRunner.step, threading.Event(), threading.Event()

    def fail(*args: object) -> object:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("a bug")
        if dead.is_set():
            raise RuntimeError("a bug")
        return step(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(LlamaRunner, "step", fail)
    options = LocalOptions(runner="llamacpp", slots=2, context=256, threads=1)
    engine = SupervisedEngine(lambda: LocalEngine.open(default_model(), options))
    body = {**HELLO, "max_tokens": 4, "temperature": 0}
    with background(engine, Settings(port=0, store="none")) as url:
        answer = post(url, "/v1/chat/completions", body).json()["choices"]
        broken.set()
        assert post(url, "/v1/chat/completions", body).json()["choices"] == answer, "it is computed again"
        dead.set()
        # Each failed answer costs a rebuild, until the engine is opened again.
        for _ in range(4):
            failed = post(url, "/v1/chat/completions", body)
            assert failed.status_code >= 500
            assert "bug" not in failed.text
        dead.clear()
        assert becomes(lambda: get(url, "/ready").status_code == 200)
        assert post(url, "/v1/chat/completions", body).json()["choices"] == answer
