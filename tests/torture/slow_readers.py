"""Clients that read a kilobyte a second, or nothing at all.

What a slow client has not read yet is held by somebody; it is to be little, and others are to notice nothing.
"""

import asyncio
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.attacks.frame import AttackedServer, attacked
from tests.attacks.raw_socket import held, place
from tests.support.wire import ask, request
from tests.torture.page import Row, scaled

CHAT = "/v1/chat/completions"
ANSWER_TOKENS, PACE_S = 2000, 0.04
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x" * ANSWER_TOKENS}],
    "max_tokens": ANSWER_TOKENS,
    "n": 2,
    "stream": True,
}
"""Its answer is about a megabyte of events."""
SHORT: dict[str, Any] = {"messages": [{"role": "user", "content": "y" * 50}], "stream": True}
CLIENTS, RATE = 500, 1024
DEAF = 20
WRITE_S, SLACK_S = 60.0, 20.0
"""The usual time after which a client that takes nothing is cut off, and what fills up before it begins."""
MOST_KB, MOST_MB, LEAST_SPEED = 128, 80, 0.9
SAMPLES = 5


class Observations(Struct):
    memory: int
    """Bytes that the server took for all of them."""
    added: int
    """Of these, from when all had begun to when half was said: what is told and not taken."""
    kernel: int
    """Most bytes that the system holds for one connection."""
    speed: float
    """Of a client that reads, as a share of what it was without the others."""
    cut: float
    """Seconds until the last client was cut off that read nothing."""
    lost: int
    """Slow clients that were cut off though they read."""


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    clients = scaled(CLIENTS, scale, least=100)
    room = {"in_flight": 2 * (clients + DEAF) + 1}
    with attacked(write_timeout=WRITE_S, interval=PACE_S, limits=room) as server:
        seen = asyncio.run(_run(server, clients))
    each = (seen.added / (clients + DEAF) + seen.kernel) / 1024
    memory = seen.memory / 2**20
    who = f"{clients} clients that read {RATE} bytes a second"
    return [
        Row(f"{who}: held for each", f"{each:.0f} KiB", f"<= {MOST_KB} KiB", each <= MOST_KB),
        Row(f"{who}: memory", f"+ {memory:.0f} MB", f"<= {MOST_MB} MB", memory <= MOST_MB),
        Row(
            f"{who}: speed of another",
            f"{seen.speed:.0%}",
            f">= {LEAST_SPEED:.0%}",
            seen.speed >= LEAST_SPEED,
        ),
        Row(f"{who}: cut off", f"{seen.lost}", "0", seen.lost == 0),
        Row(
            f"{DEAF} clients that read nothing are cut off",
            f"the last after {seen.cut:.0f} s",
            f"{WRITE_S:g} s",
            seen.cut < WRITE_S + SLACK_S,
        ),
    ]


async def _run(server: AttackedServer, clients: int) -> Observations:
    long, short = request(server.url, CHAT, LONG), request(server.url, CHAT, SHORT)
    # What is made once has been made.
    await asyncio.gather(*(ask(server.url, long) for _ in range(DEAF)))
    alone = await _pace(server, short)
    over, before = asyncio.Event(), server.memory()
    slow = [asyncio.create_task(_read_slowly(server.url, long, over)) for _ in range(clients)]
    deaf = [await _opened(server.url, long) for _ in range(DEAF)]
    cut = asyncio.create_task(_until_cut(server, deaf))
    while server.state().live < 2 * (clients + DEAF):
        await asyncio.sleep(0.2)
    begun = server.memory()
    await asyncio.sleep(ANSWER_TOKENS * PACE_S / 2)
    half, kernel = server.memory(), _unsent(server)
    while server.state().live:
        await asyncio.sleep(0.5)
    memory = server.memory()
    # Now that the engine has no more to do for them than for one: they still read.
    among = await _pace(server, short)
    cut_after = await cut
    over.set()
    kept = await asyncio.gather(*slow)
    return Observations(memory - before, half - begun, kernel, alone / among, cut_after, kept.count(False))


async def _pace(server: AttackedServer, short: bytes) -> float:
    """Seconds of an answer."""
    times = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        await ask(server.url, short)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


async def _until_cut(server: AttackedServer, deaf: Sequence[socket.socket]) -> float:
    began = time.monotonic()
    ports = {one.getsockname()[1] for one in deaf}
    while ports & {one.port for one in held(server.process.pid)}:
        await asyncio.sleep(1.0)
    for one in deaf:
        one.close()
    return time.monotonic() - began


async def _opened(url: str, sent: bytes) -> socket.socket:
    """A connection whose client side keeps little, as on a slow line."""
    result = socket.socket()
    result.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    result.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(result, place(url))
    await loop.sock_sendall(result, sent)
    return result


async def _read_slowly(url: str, sent: bytes, over: asyncio.Event) -> bool:
    """Whether the server put up with it for as long as it lasted."""
    result, loop = await _opened(url, sent), asyncio.get_running_loop()
    with result:
        while not over.is_set():
            try:
                if not await asyncio.wait_for(loop.sock_recv(result, RATE), 30):
                    return False
            except TimeoutError:
                pass
            except ConnectionError:
                return False
            await asyncio.sleep(1.0)
    return True


def _unsent(server: AttackedServer) -> int:
    """The most that the system holds of what was written to one connection and not taken by its client."""
    port = f"{place(server.url)[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    return max(int(row[4].split(":")[0], 16) for row in rows if row[1].endswith(port) and row[3] == "01")
