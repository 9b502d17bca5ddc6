"""What a server does with signals, alone in a process and inside somebody else's program."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import httpx
import pytest

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.errors import Unavailable
from dragoman.http import server
from dragoman.http.app import App
from dragoman.http.listeners import bind
from dragoman.http.server import aserve, background, serve
from dragoman.settings import Settings
from dragoman.types import Job, Sink
from tests.support.http import HELLO

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SETTINGS = Settings(port=0, store="none", shutdown_grace=0)


@pytest.fixture(autouse=True)
def heard() -> Iterator[list[int]]:
    """The signals that reach the program around the server."""
    got: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        got.append(number)

    before = {number: signal.signal(number, hear) for number in STOPPING}
    yield got
    for number, handler in before.items():
        signal.signal(number, handler)


def engine() -> ScriptedEngine:
    return ScriptedEngine(say("hello"))


@pytest.mark.parametrize("number", STOPPING)
def test_serve_returns_when_a_signal_says_stop(number: signal.Signals, heard: list[int]) -> None:
    serve(engine(), SETTINGS, on_ready=lambda url: signal.raise_signal(number))
    assert heard == []
    signal.raise_signal(number)
    assert heard == [number]


@pytest.mark.parametrize("number", STOPPING)
def test_a_server_in_a_bigger_program_passes_the_signal_on(number: signal.Signals, heard: list[int]) -> None:
    asyncio.run(aserve(engine(), SETTINGS, on_ready=lambda url: signal.raise_signal(number)))
    assert heard == [number]


def test_a_hangup_that_is_ignored_stops_nothing(heard: list[int]) -> None:
    """As `nohup` has it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def ready(url: str) -> None:
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGTERM)

    serve(engine(), SETTINGS, on_ready=ready)


def test_the_third_signal_ends_a_process_that_is_the_servers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[int] = []
    listener = bind("127.0.0.1", 0)
    uvicorn_server = server._UvicornServer(App(engine(), SETTINGS), listener, None)
    uvicorn_server.third_ends_process = True
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    for _ in range(2):
        uvicorn_server.handle_exit(signal.SIGTERM, None)
    assert (raised, uvicorn_server.force_exit) == ([], False)
    uvicorn_server.handle_exit(signal.SIGTERM, None)
    assert raised == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    listener.close()


class Takes(ScriptedEngine):
    """Installs a handler of its own with the first request, as engines with processes do."""

    def __init__(self, way: str) -> None:
        super().__init__(say("hello"), interval=0.05)
        self.way = way
        self.told: list[int] = []
        self.stopped = False

    def submit(self, job: Job, sink: Sink) -> Any:
        if self.way == "loop":
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.told.append, signal.SIGTERM)
        else:
            signal.signal(signal.SIGTERM, lambda number, frame: self.told.append(number))
        return super().submit(job, sink)

    async def stop(self) -> None:
        assert not self.told
        self.stopped = True
        await super().stop()


@pytest.mark.parametrize("way", ["loop", "signal"])
def test_an_engine_that_takes_the_signal_is_told_after_the_server(way: str, heard: list[int]) -> None:
    """The answer under way comes to its end, as it does where nobody else wants the signal."""
    taker, answers = Takes(way), list[str]()

    def ask(url: str) -> None:
        with httpx.stream("POST", url + "/v1/chat/completions", json={**HELLO, "stream": True}) as reply:
            parts = reply.iter_text()
            answers.append(next(parts))
            if way == "signal":
                time.sleep(0.2)  # that it is taken is noticed by looking
            os.kill(os.getpid(), signal.SIGTERM)
            answers.extend(parts)

    askers: list[threading.Thread] = []

    def ready(url: str) -> None:
        askers.append(threading.Thread(target=ask, args=(url,)))
        askers[0].start()

    serve(taker, Settings(port=0, store="none", shutdown_grace=10), on_ready=ready)
    askers[0].join()
    assert "[DONE]" in "".join(answers)
    assert (taker.stopped, taker.told, heard) == (True, [signal.SIGTERM], [])
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_ctrl_c_while_a_server_in_the_background_stops_waits_for_it_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(threading.enumerate())
    joined = threading.Thread.join
    pressed: list[bool] = []

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "dragoman-serve" and not pressed:
            pressed.append(True)
            raise KeyboardInterrupt
        joined(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(KeyboardInterrupt), background(engine(), SETTINGS):
        pass
    left = set(threading.enumerate()) - before
    assert not any(thread.name == "dragoman-serve" for thread in left)


def test_a_start_that_fails_leaves_nothing_running() -> None:
    stopped: list[bool] = []
    others = set(threading.enumerate())

    class BrokenEngine(ScriptedEngine):
        async def start(self) -> None:
            raise OSError

        async def stop(self) -> None:
            stopped.append(True)

        async def check(self) -> None:
            pass

    with pytest.raises(Unavailable):
        serve(BrokenEngine(say("hello")), Settings(port=0, store="memory"))
    assert stopped == [True]
    new = set(threading.enumerate()) - others
    assert not any(thread.name.startswith("dragoman-store") for thread in new)
