"""SIGTERM with fifty requests in flight, many times: each has an end."""

import asyncio
import time
from random import Random
from typing import Any

from msgspec import Struct

from tests.attacks.frame import AttackedServer, attacked
from tests.support.wire import RawReply, ask, request
from tests.torture.bleed import CHAT, COMPLETIONS, RESPONSES, bodies
from tests.torture.page import Row, progress, scaled

ROUNDS, IN_FLIGHT = 20, 50
PACE_S = 0.01
GRACE_S = 1
MOST_OVER_S = 1.0
ENDS = (b"data: [DONE]", b'"error":{', b"event: response.failed")


class Round(Struct):
    over_s: float = 0.0
    """From the end of the grace to the end of the process."""
    endless: int = 0
    """Requests whose clients were not told how they ended."""
    done: int = 0
    refused: int = 0
    unrefused: int = 0
    """New requests that were neither refused in the right way, nor late enough to meet a closed door."""


def ended(streams: bool, heard: RawReply) -> bool:
    """Whether the client knows how it ended."""
    if streams and heard.status == 200:
        return any(mark in heard.data[-2000:] for mark in ENDS)
    return heard.status in (200, 503) and heard.body.endswith(b"}")


async def round_of(server: AttackedServer, in_flight: int, chance: Random) -> Round:
    result = Round()

    async def client() -> None:
        text, streams = "x" * chance.randrange(60, 600), chance.random() < 0.7
        path = chance.choice([CHAT, COMPLETIONS, RESPONSES])
        body: dict[str, Any] = {**bodies(text)[path], "stream": streams}
        heard = await ask(server.url, request(server.url, path, body), patience=60)
        result.endless += not ended(streams, heard)
        result.done += heard.status == 200 and b"failed" not in heard.data and b'"error":{' not in heard.data

    clients = [asyncio.create_task(client()) for _ in range(in_flight)]
    while (await asyncio.to_thread(server.state)).live + sum(map(asyncio.Task.done, clients)) < in_flight:
        await asyncio.sleep(0.01)
    server.process.terminate()
    signalled = time.monotonic()
    await knock(server, result, signalled)
    await asyncio.gather(*clients)
    await asyncio.to_thread(server.process.wait, 60)
    result.over_s = time.monotonic() - signalled - GRACE_S
    return result


async def knock(server: AttackedServer, result: Round, signalled: float) -> None:
    """New requests during the grace."""
    sent = request(server.url, CHAT, bodies("x")[CHAT])
    # The signal is looked for ten times a second.
    await asyncio.sleep(0.2)
    while time.monotonic() < signalled + GRACE_S / 2:
        try:
            heard = await ask(server.url, sent, patience=10)
        except OSError:
            break
        right = heard.status == 503 and b"retry-after: " in heard.head and b"connection: close" in heard.head
        result.refused += right
        result.unrefused += not right
        await asyncio.sleep(0.1)


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    result, chance, rounds = list[Round](), Random(seed), scaled(ROUNDS, scale)
    while len(result) < rounds:
        with attacked(interval=PACE_S, shutdown_grace=GRACE_S) as server:
            result.append(asyncio.run(round_of(server, IN_FLIGHT, chance)))
        progress(len(result), rounds, "rounds")
    return rows(result, f"{rounds} x SIGTERM with {IN_FLIGHT} in flight")


def rows(rounds: list[Round], what: str) -> list[Row]:
    endless, done = sum(one.endless for one in rounds), sum(one.done for one in rounds)
    refused, unrefused = sum(one.refused for one in rounds), sum(one.unrefused for one in rounds)
    worst = max(one.over_s for one in rounds)
    return [
        Row(f"{what}: clients without an end", f"{endless} ({done} were done in time)", "0", endless == 0),
        Row(
            f"{what}: new requests",
            f"{refused} refused, {unrefused} otherwise",
            "503 + Retry-After",
            unrefused == 0 < refused,
        ),
        Row(
            f"{what}: the process ends",
            f"{worst:+.2f} s after the grace",
            f"<= {MOST_OVER_S} s",
            worst <= MOST_OVER_S,
        ),
    ]
