"""Clients that send a byte a second, and what others notice."""

import asyncio
import time

import httpx

from tests.attacks.frame import attacked
from tests.attacks.raw_messages import HOST, post
from tests.attacks.raw_socket import place
from tests.torture.page import Row, scaled

CLIENTS = 500
HEAD_S, BODY_S = 10.0, 30.0
"""The usual deadlines."""
SLACK_S = 2.0
ASK_EVERY_S = 0.02
HEAD = b"GET /health HTTP/1.1\r\n" + HOST + b"X: "
BODY = post(b"Content-Length: 100000\r\n", b"{")


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    with attacked() as server:
        return asyncio.run(_run(server.url, scaled(CLIENTS, scale, least=2)))


async def _run(url: str, clients: int) -> list[Row]:
    over = asyncio.Event()
    asking = asyncio.create_task(_ask(url, over))
    heads = [_dribble(url, HEAD) for _ in range(clients // 2)]
    bodies = [_dribble(url, BODY) for _ in range(clients - len(heads))]
    cut = await asyncio.gather(*heads, *bodies)
    over.set()
    times = sorted(await asking)
    p99 = times[99 * len(times) // 100] * 1000
    slowest = [max(times) for times in (cut[: len(heads)], cut[len(heads) :])]
    return [
        *(
            Row(
                f"{count} clients that send a byte of a {what} every second are cut off",
                f"the last after {last:.1f} s",
                f"{limit:g} s",
                last < limit + SLACK_S,
            )
            for count, what, last, limit in (
                (len(heads), "head", slowest[0], HEAD_S),
                (len(bodies), "body", slowest[1], BODY_S),
            )
        ),
        Row(f"what others notice of {clients} slow senders", f"p99 {p99:.1f} ms", "under 100 ms", p99 < 100),
    ]


async def _dribble(url: str, begin: bytes) -> float:
    """How long the server put up with it."""
    reader, writer = await asyncio.open_connection(*place(url))
    began = time.monotonic()
    writer.write(begin)
    answer = asyncio.create_task(reader.read(1))
    while not (await asyncio.wait({answer}, timeout=1.0))[0]:
        writer.write(b" ")
    writer.close()
    return time.monotonic() - began


async def _ask(url: str, over: asyncio.Event) -> list[float]:
    """How long the server took for somebody who is quick."""
    times = []
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client:
        while not over.is_set():
            began = time.perf_counter()
            (await client.get("/health")).raise_for_status()
            times.append(time.perf_counter() - began)
            await asyncio.sleep(ASK_EVERY_S)
    return times
