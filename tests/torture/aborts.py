"""Clients that leave in the middle of anything. None of it may stay."""

import asyncio
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from tests.attacks.frame import AttackedServer, attacked
from tests.attacks.server import State
from tests.support.parrot import NAME
from tests.support.wire import ask, request, some_at_once
from tests.torture.page import Row, scaled

STREAMS, WHOLES = 10_000, 2_000
PACE_S = 0.001
TEXT = "a b c d e " * 12
AT_ONCE = 64
PATIENCE_S = 10.0
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/completions": {"prompt": TEXT, "max_tokens": len(TEXT)},
    "/v1/responses": {"input": TEXT},
    "/v1/messages": {
        "model": NAME,
        "max_tokens": len(TEXT),
        "messages": [{"role": "user", "content": TEXT}],
    },
}


class Storm:
    """Leaves at places that are as likely as each other, over the whole length of request and answer."""

    def __init__(
        self, url: str, seed: int, bodies: Mapping[str, dict[str, Any]] = BODIES, at_once: int = AT_ONCE
    ) -> None:
        self._url = url
        self._chance = Random(seed)
        self._bodies = bodies
        self._at_once = at_once

    async def streams(self, count: int) -> None:
        lengths = {}
        for path, body in self._bodies.items():
            sent = request(self._url, path, {**body, "stream": True})
            lengths[path] = (sent, len((await ask(self._url, sent)).data))

        async def leave() -> None:
            sent, length = self._chance.choice(list(lengths.values()))
            at = self._chance.randrange(len(sent) + length)
            if at < len(sent):
                await ask(self._url, sent, cut=at)
            else:
                await ask(self._url, sent, most=at - len(sent), patience=60)

        await some_at_once(leave, count, self._at_once)

    async def wholes(self, count: int, longest: float = 2 * PACE_S * len(TEXT)) -> None:
        """`longest`: seconds after which an answer would be there."""

        async def leave() -> None:
            path, body = self._chance.choice(list(self._bodies.items()))
            sent = request(self._url, path, body)
            await ask(self._url, sent, patience=self._chance.uniform(0, longest))

        await some_at_once(leave, count, self._at_once)


def settled(server: AttackedServer, before: State) -> tuple[float, State]:
    """How long the last job lived on, and what is left when all has had its time."""
    began = time.monotonic()
    while server.state().live and time.monotonic() < began + PATIENCE_S:
        time.sleep(0.01)
    live_s = time.monotonic() - began
    while (after := server.state()) and time.monotonic() < began + PATIENCE_S:
        if after.tasks <= before.tasks and after.descriptors <= before.descriptors:
            break
        time.sleep(0.05)
    return live_s, after


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    streams, wholes = scaled(STREAMS, scale), scaled(WHOLES, scale)
    with attacked(interval=PACE_S) as server:
        storm = Storm(server.url, seed)
        asyncio.run(storm.streams(20))
        before = settled(server, server.state())[1]
        asyncio.run(storm.streams(streams))
        asyncio.run(storm.wholes(wholes))
        live_s, after = settled(server, before)
    left = f"{after.tasks - before.tasks:+d} tasks, {after.descriptors - before.descriptors:+d} descriptors"
    done = f"{streams:,} streams and {wholes:,} whole answers that clients leave"
    return [
        Row(f"{done}: no job lives on", f"{after.live} after {live_s:.2f} s", "0 within 1 s", live_s <= 1.0),
        Row(
            f"{done}: nothing is left of them",
            left,
            "as before",
            after.tasks <= before.tasks and after.descriptors <= before.descriptors,
        ),
    ]
