"""An engine that is killed, crashes and hangs, a hundred times."""

import asyncio
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from dragoman.cli.builtin_engines import model_file
from dragoman.cli.engine import isolate
from dragoman.engines.isolated import IsolatedEngine
from dragoman.engines.local import LocalEngine
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import ByteTokenizer
from dragoman.engines.supervisor import SupervisedEngine
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job, Sampling
from tests.engines.local.support import FakeRunner
from tests.support.crashes import KILLS, Crash, crash, isolated_server
from tests.torture.page import Row, progress, scaled

CYCLES = 100
STREAMS = 20
FREE = 5
"""Crashes in a minute that are healed at once. So each server has as many, and then comes another."""


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    return [*crashes(scaled(CYCLES, scale)), wedged()]


def crashes(cycles: int) -> list[Row]:
    seen: list[Crash] = []
    loads: list[float] = []
    while len(seen) < cycles:
        # Beside every server, so that both meet the same neighbours.
        loads.append(load_time())
        with isolated_server("--slots", "8", "--store", "none") as server:
            for _ in range(min(FREE, cycles - len(seen))):
                seen.append(crash(server, KILLS[len(seen) % len(KILLS)], STREAMS))
                progress(len(seen), cycles, "crashes")
    loading = max(loads)
    values = [end for each in seen for end in each.ends]
    untold = sum(each.untold for each in seen)
    refused = sum(each.refused > 0 for each in seen)
    back = [each.back for each in seen]
    what = f"{cycles} crashes (kill, segfault, stop) with {STREAMS} streams"
    return [
        Row(f"{what}: each is told", f"{untold} untold", "0", untold == 0),
        _within("its streams are told", values, 1.0),
        _within("/ready is 503", [each.unready for each in seen], 1.0),
        Row("a new request gets a 503 meanwhile", f"{refused} of {cycles}", "all", refused == cycles),
        _within(f"it serves again (loading takes up to {loading:.2f} s)", back, loading + 1.0),
    ]


def load_time() -> float:
    """Seconds until a process that is begun has answered, with nobody else at work."""
    settings = Settings(model=str(model_file(Settings())), threads=1, context=1024, slots=8)
    began = time.monotonic()
    asyncio.run(_answer_of(isolate(settings)))
    return time.monotonic() - began


async def _answer_of(engine: IsolatedEngine) -> None:
    await engine.start()
    async for _ in engine.generate(Job(id="", prompt=(1,) * 36, sampling=Sampling(max_tokens=1))):
        pass
    engine.abandon()


def wedged() -> Row:
    """An engine in the server's own process whose thread stands still."""
    runner, inside, go = FakeRunner(), threading.Event(), threading.Event()

    def stand_still() -> None:
        inside.set()
        go.wait()

    runner.before_step = stand_still
    card = ModelCard(name="m", max_model_len=runner.context)
    engine = SupervisedEngine(lambda: LocalEngine(runner, ByteTokenizer(), card))
    with background(engine, Settings(port=0, store="none")) as url, ThreadPoolExecutor() as pool:
        asked = pool.submit(
            httpx.post, url + "/v1/completions", json={"prompt": [1], "max_tokens": 1}, timeout=60
        )
        inside.wait()
        began = time.monotonic()
        while httpx.get(url + "/ready").status_code == 200:
            time.sleep(0.01)
        seen = time.monotonic() - began
        go.set()
        asked.result()
    return _within("/ready is 503 when the engine's thread stands still", [seen], 2.0)


def _within(what: str, times: list[float], most: float) -> Row:
    worst, usual = max(times), statistics.median(times)
    return Row(what, f"{usual:.2f} s, at most {worst:.2f} s", f"<= {most:.2f} s", worst <= most)
