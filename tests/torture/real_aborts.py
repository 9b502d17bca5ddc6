"""Clients that leave the embedded model in the middle of anything: it is rid of their work at once."""

import asyncio
import os
import re
import time
from typing import Any

import httpx

from tests.support.crashes import STORY, Server, isolated_server
from tests.torture.aborts import Storm
from tests.torture.page import Row, scaled

ABORTS = 1_000
SLOTS = 4
PATIENCE_S = 30.0
LONG: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**STORY, **LONG},
    "/v1/completions": {"prompt": "Once upon a time", **LONG},
}
ANSWER = {**STORY, "max_tokens": 16, "temperature": 0}
BUSY = re.compile(r"^dragoman_answers_(?:running|waiting)\{[^}]*\} (\d+)", re.MULTILINE)


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    aborts = scaled(ABORTS, scale)
    with isolated_server("--slots", str(SLOTS), "--store", "none") as server:
        storm = Storm(server.url, seed, BODIES, at_once=2 * SLOTS)
        asyncio.run(storm.streams(2 * SLOTS))
        _settled(server)
        held, engine = _descriptors(server.pid), server.engine
        asyncio.run(storm.streams(aborts - aborts // 5))
        asyncio.run(storm.wholes(aborts // 5, longest=1.0))
        seconds = _settled(server)
        same = _answer(server) != "" and server.engine == engine
        more = _descriptors(server.pid) - held
    what = f"{aborts:,} answers of the embedded model that clients leave"
    return [
        Row(f"{what}: none is computed on", f"the last for {seconds:.2f} s", "0 within 1 s", seconds <= 1.0),
        Row(f"{what}: descriptors left", f"{more:+d}", "0", more <= 0),
        Row(f"{what}: the same process answers", "yes" if same else "no", "yes", same),
    ]


def _settled(server: Server) -> float:
    """Seconds until nothing is computed and nobody waits."""
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE_S:
        matches = BUSY.findall(httpx.get(f"{server.url}/metrics").text)
        if matches and not any(map(int, matches)):
            break
        time.sleep(0.01)
    return time.monotonic() - began


def _answer(server: Server) -> str:
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=ANSWER, timeout=120)
    return str(reply.json()["choices"][0]["message"]["content"])


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
