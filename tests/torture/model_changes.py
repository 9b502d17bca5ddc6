"""Models that are loaded and unloaded in any order while streams run, and what waking one costs."""

import asyncio
import gc
import random
import statistics
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import httpx

from dragoman.cli.engine import make_served_engine
from dragoman.engines.default_weights import default_model
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.server import background
from dragoman.http.upkeep import give_back, resident
from dragoman.models import ModelPool
from dragoman.models.catalog import build_pool
from dragoman.settings import Settings
from dragoman.turns.queue import WorkerPool
from tests.support.engines import RUNNER
from tests.support.http import HELLO
from tests.support.pools import Queues, Shop
from tests.support.tiny_gguf import write_tiny
from tests.torture.page import Row, scaled

CHANGES, NATIVE_CHANGES, WAKES = 1000, 200, 10
NAMES = ("a", "b", "c", "d")
STREAMS = 8
MOST_GROWN = 8 << 20
MOST_GROWN_NATIVE = 16 << 20
"""A load that is lost has keys and values of as much."""
WAKE_RATIO = 1.2
SWITCHES, SWITCH_RATIO = 2000, 1.05


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    shop = Shop()
    shop.more, shop.interval = "x" * 40, 0.002
    settings = Settings(port=0, store="none", models_max=2, shutdown_grace=0, log_level="error")
    rows = _change(shop.pool(*NAMES, settings=settings), settings, scaled(CHANGES, scale), seed, "scripted")
    rows.append(Row("engines that are open at the end", str(len(shop.open)), "0", not shop.open))
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES[:3]:
            write_tiny(Path(folder, f"{name}.gguf"))
        own = Settings(
            port=0,
            store="none",
            models_dir=folder,
            models_max=2,
            shutdown_grace=0,
            runner="llamacpp",
            kv_memory=16,
            log_level="error",
        )
        pool = build_pool(own, make_served_engine)
        rows += _change(pool, own, scaled(NATIVE_CHANGES, scale), seed, "GGUF")
    return [
        *rows,
        _switch(scaled(SWITCHES, scale, least=200)),
        asyncio.run(_wake(scaled(WAKES, scale, least=2))),
    ]


def _change(pool: ModelPool, settings: Settings, changes: int, seed: int, what: str) -> list[Row]:
    with background(pool, settings) as url:
        warm = max(2, changes // 5)
        asyncio.run(_play(url, list(pool.models), warm, seed))
        before = _memory()
        ends = asyncio.run(_play(url, list(pool.models), changes, seed + 1))
        grown = _memory() - before
    most = MOST_GROWN if what == "scripted" else MOST_GROWN_NATIVE
    text = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    return [
        Row(
            f"{changes} loads and unloads of {what} models in random order beside {STREAMS} streams: "
            "streams that end with neither an end nor an error",
            f"{ends['lost']} of {sum(ends.values())} ({text})",
            "0",
            not ends["lost"],
        ),
        Row(
            f"memory after {changes} loads and unloads of {what} models",
            f"{grown / (1 << 20):+.1f} MB",
            f"under {most >> 20} MB more",
            grown < most,
        ),
    ]


def _memory() -> int:
    gc.collect()
    give_back()
    return resident()


async def _play(url: str, names: list[str], changes: int, seed: int) -> Counter[str]:
    draw, ends, over = random.Random(seed), Counter[str](lost=0), asyncio.Event()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, verify=False, limits=limits) as client:
        streams = [asyncio.create_task(_stream(client, names, draw, ends, over)) for _ in range(STREAMS)]
        for _ in range(changes):
            route = draw.choice(("/models/load", "/models/unload"))
            reply = await client.post(route, json={"model": draw.choice(names)})
            assert reply.status_code in (200, 503), reply.text
            await asyncio.sleep(draw.random() / 200)
        over.set()
        await asyncio.gather(*streams)
    return ends


async def _stream(
    client: httpx.AsyncClient, names: list[str], draw: random.Random, ends: Counter[str], over: asyncio.Event
) -> None:
    while not over.is_set():
        body = {**HELLO, "model": draw.choice(names), "stream": True, "max_tokens": 24}
        try:
            reply = await client.post("/v1/chat/completions", json=body)
            ends[_end(reply)] += 1
        except httpx.HTTPError:
            ends["lost"] += 1


def _end(reply: httpx.Response) -> str:
    if reply.text.endswith("data: [DONE]\n\n"):
        return "whole"
    return "told" if '"error":{' in reply.text else "lost"


def _switch(times: int) -> Row:
    """Requests for two models in turns against requests for one of them."""
    engines = {name: ScriptedEngine(say("hi")) for name in NAMES[:2]}
    settings = Settings(port=0, store="none", log_level="error")
    with background(engines, settings) as url, httpx.Client(base_url=url, verify=False) as client:

        def ask(name: str) -> float:
            began = time.perf_counter()
            client.post("/v1/chat/completions", json={**HELLO, "model": name}).raise_for_status()
            return time.perf_counter() - began

        taken = [(ask("a"), ask(NAMES[number % 2])) for number in range(times)]
    same, turns = (statistics.median(each) for each in zip(*taken, strict=True))
    text = f"{turns / same:.2f} ({turns * 1e6:.0f} µs against {same * 1e6:.0f} µs)"
    target = f"at most {SWITCH_RATIO}"
    return Row("requests for two models in turns against one", text, target, turns / same <= SWITCH_RATIO)


async def _wake(times: int) -> Row:
    """One that sleeps against one that was never loaded, of the default weights."""
    settings = Settings(store="none", model=str(default_model()), runner=RUNNER, kv_memory=64)

    async def once(pool: ModelPool) -> float:
        began = time.perf_counter()
        await pool.load(pool.default)
        return time.perf_counter() - began

    plain, woken = [], []
    for _ in range(times):
        pool = _alone(settings)
        plain.append(await once(pool))
        await pool.unload(pool.default, state="sleeping")
        woken.append(await once(pool))
        await pool.stop()
    # Others run beside it: the quickest of several is what it takes.
    ratio = min(woken) / min(plain)
    text = f"{ratio:.2f} ({statistics.median(woken):.2f} s against {statistics.median(plain):.2f} s)"
    return Row(
        "waking a sleeping model against loading it", text, f"at most {WAKE_RATIO}", ratio <= WAKE_RATIO
    )


def _alone(settings: Settings) -> ModelPool:
    pool = build_pool(settings, partial(make_served_engine))
    pool.startup_model = None
    pool.attach(WorkerPool(), Queues(), None)
    return pool
