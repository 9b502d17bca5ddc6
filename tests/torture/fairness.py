"""A flood by one key, of whatever kind, and how long another key's small request takes meanwhile.

What it may take is measured first: the time beside another key that asks the same thing all the while, as
often as half of the engine's slots can answer it. That is an equal share, and twice that is the bound.
"""

import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import httpx
from websockets.asyncio.client import connect

from tests.attacks.frame import attacked
from tests.support.crashes import isolated_server
from tests.torture.page import Row, scaled

GREEDY, MODEST = "sk-greedy", "sk-modest"
SLOTS = 8
ASKS = 15
SETTLE_S = 2.0
MOST = 2.0
LOWEST = -(2**31)
LONG = "Tell me a long story about a river. " * 8
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


SMALL = said("Say hello.", max_tokens=8, priority=9)
LENGTHY: dict[str, Any] = {"max_tokens": 256, "ignore_eos": True, "priority": LOWEST}
FLOODS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "priority": [(CHAT, said(LONG, **LENGTHY))],
    "n": [(CHAT, said(LONG, n=64, **LENGTHY))],
    "prompts": [(COMPLETIONS, {"prompt": [f"{n} {LONG}" for n in range(64)], **LENGTHY})],
    "reading": [(COMPLETIONS, {"prompt": [f"{n} {LONG}" for n in range(64)], "max_tokens": 1})],
    "embeddings": [("/v1/embeddings", {"input": [f"{n} {LONG}" for n in range(128)]})],
    "tokenize": [("/tokenize", {"prompt": LONG * 1500})],
    "background": [(RESPONSES, {"input": LONG, "background": True, "max_output_tokens": 256})],
    "sockets": [(RESPONSES, {"type": "response.create", "input": LONG, "max_output_tokens": 256})],
}
FLOODS["all of them"] = [one for kind in FLOODS.values() for one in kind]
AT_ONCE = 24


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    asks = scaled(ASKS, scale, least=5)
    return [_row("the scripted engine", _scripted, asks), _row("the embedded model", _embedded, asks)]


@contextmanager
def _scripted() -> Iterator[str]:
    with attacked(interval=0.01, api_key=[GREEDY, MODEST], engine_slots=SLOTS, context=16384) as server:
        yield server.url


@contextmanager
def _embedded() -> Iterator[str]:
    flags = [word for key in (GREEDY, MODEST) for word in ("--api-key", key)]
    with isolated_server("--slots", str(SLOTS), "--store", "memory", *flags) as server:
        yield server.url


def _row(what: str, server: Callable[[], AbstractContextManager[str]], asks: int) -> Row:
    fields = {}
    for name in FLOODS:
        # What was asked in the background goes on for long, so each has a server of its own.
        with server() as url:
            with _beside(_small_ones, url):
                share = _asked(url, asks)
            with _beside(_flood, url, name):
                took = _asked(url, asks)
        fields[name] = took / share
        print(f"  {what}, {name}: {1000 * took:.0f} ms; an equal share: {1000 * share:.0f} ms", flush=True)
    worst = max(fields, key=fields.__getitem__)
    return Row(
        f"a small request to {what} beside a flood by another key takes, of the time of an equal share",
        f"at worst ({worst}) {fields[worst]:.1f}",
        f"{MOST:g}",
        fields[worst] <= MOST,
    )


def _asked(url: str, asks: int) -> float:
    """The median, in seconds."""
    times = []
    with httpx.Client(base_url=url, headers=_key(MODEST), timeout=120, verify=False) as client:
        for _ in range(asks):
            began = time.perf_counter()
            reply = client.post(CHAT, json=SMALL)
            times.append(time.perf_counter() - began)
            assert reply.status_code == 200, reply.text
    return statistics.median(times)


@contextmanager
def _beside(work: Callable[..., Any], *given: Any) -> Iterator[None]:
    """Inside, a process of its own does it again and again, so that it takes nothing from who measures."""
    process = multiprocessing.get_context("spawn").Process(target=_forever, args=(work, *given), daemon=True)
    process.start()
    time.sleep(SETTLE_S)
    try:
        yield
    finally:
        process.kill()
        process.join()


def _forever(work: Callable[..., Any], *given: Any) -> None:
    # Linux shares processors out between sessions: clients are no part of the server.
    os.setsid()
    asyncio.run(work(*given))


async def _small_ones(url: str) -> None:
    await _send(url, [(CHAT, SMALL)], SLOTS // 2)


async def _flood(url: str, name: str) -> None:
    await _send(url, FLOODS[name], AT_ONCE)


async def _send(url: str, wishes: list[tuple[str, dict[str, Any]]], at_once: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=_key(GREEDY), timeout=None, verify=False, limits=limits
    ) as client:

        async def again(path: str, body: dict[str, Any]) -> None:
            written, kind = json.dumps(body), {"content-type": "application/json"}
            while True:
                with suppress(httpx.HTTPError, OSError):
                    if "type" in body:
                        await _over_socket(url, written)
                    elif (await client.post(path, content=written, headers=kind)).status_code == 429:
                        await asyncio.sleep(0.05)

        await asyncio.gather(*(again(*wishes[number % len(wishes)]) for number in range(at_once)))


async def _over_socket(url: str, written: str) -> None:
    async with connect(url.replace("http", "ws") + RESPONSES, additional_headers=_key(GREEDY)) as socket:
        while True:
            await socket.send(written)
            async for message in socket:
                if json.loads(message)["type"] in ("response.completed", "response.failed", "error"):
                    break


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
