"""Four times as many requests as the server can answer, for a minute.

What is too much is refused at once, and what is let in is answered as fast as if the rest had not come.
"""

import asyncio
import statistics
import time
from collections import Counter

from msgspec import Struct, field

from tests.attacks.frame import AttackedServer, attacked
from tests.support.wire import RawReply, ask, request, some_at_once
from tests.torture.page import Row, scaled

CHAT = "/v1/chat/completions"
SECONDS = 60
PLACES, QUEUE = 16, 32
PACE_S, LETTERS = 0.01, 50
TIMES = 4
LEAST_GOODPUT, MOST_MS = 0.9, 10.0
DONE = b"data: [DONE]"


class Load(Struct):
    """What became of the requests of one run."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    whole: int = 0
    refused_ms: list[float] = field(default_factory=list)
    unadvised: int = 0
    """Refusals that do not say when to try again."""

    def add(self, heard: RawReply) -> None:
        self.statuses[heard.status] += 1
        self.whole += DONE in heard.data
        if heard.status == 429:
            self.refused_ms.append(1000 * heard.first_s)
            self.unadvised += b"retry-after: " not in heard.head

    @property
    def goodput(self) -> float:
        return self.whole / self.seconds


def asked(server: AttackedServer) -> bytes:
    body = {"messages": [{"role": "user", "content": "x" * LETTERS}], "stream": True}
    return request(server.url, CHAT, body)


async def peak(server: AttackedServer, seconds: float) -> Load:
    """As many clients as there are places, each with one request after the other."""
    load, began, sent = Load(), time.monotonic(), asked(server)

    async def one() -> None:
        load.add(await ask(server.url, sent))

    usual_s = LETTERS * PACE_S
    await some_at_once(one, int(seconds / usual_s * PLACES), PLACES)
    load.seconds = time.monotonic() - began
    return load


async def flood(server: AttackedServer, seconds: float, rate: float) -> Load:
    """Requests come at a rate that does not ask whether the others are done."""
    load, began, sent = Load(), time.monotonic(), asked(server)
    on_their_way: set[asyncio.Task[None]] = set()

    async def one() -> None:
        load.add(await ask(server.url, sent))

    for number in range(int(seconds * rate)):
        await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
        task = asyncio.create_task(one())
        on_their_way.add(task)
        task.add_done_callback(on_their_way.discard)
    load.seconds = time.monotonic() - began
    whole = load.whole
    await asyncio.gather(*on_their_way)
    # What was still in line when the flood was over was not answered in its time.
    load.whole = whole
    return load


def tried(seconds: float) -> tuple[Load, Load]:
    with attacked(interval=PACE_S, limits={"in_flight": PLACES, "queue": QUEUE}) as server:
        quiet = asyncio.run(peak(server, max(seconds / 4, 1)))
        return quiet, asyncio.run(flood(server, seconds, TIMES * quiet.goodput))


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    seconds = scaled(SECONDS, scale, least=20)
    quiet, busy = tried(seconds)
    share = busy.goodput / quiet.goodput
    median = statistics.median(busy.refused_ms or [0.0])
    other = sum(busy.statuses.values()) - busy.statuses[200] - busy.statuses[429]
    what = f"{TIMES}x overload for {seconds} s"
    refusals = f"{median:.1f} ms, {len(busy.refused_ms):,} of them"
    return [
        Row(f"{what}: goodput of peak", f"{share:.0%}", f">= {LEAST_GOODPUT:.0%}", share >= LEAST_GOODPUT),
        Row(f"{what}: a refusal takes", refusals, f"<= {MOST_MS:.0f} ms", median <= MOST_MS),
        Row(f"{what}: answers that are neither 200 nor 429", f"{other}", "0", other == 0),
        Row(f"{what}: refusals without Retry-After", f"{busy.unadvised}", "0", busy.unadvised == 0),
    ]
