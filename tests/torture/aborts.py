"""`python -m tests.torture.aborts`: clients that leave in the middle of anything. None of it may stay."""

import argparse
import asyncio
import sys
import time
from random import Random
from typing import Any

from tests.attacks.frame import Attacked, attacked
from tests.attacks.server import State
from tests.support.wire import ask, request, some_at_once
from tests.torture.page import Row, page

PACE_S = 0.001
TEXT = "a b c d e " * 12
AT_ONCE = 64
PATIENCE_S = 10.0
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/completions": {"prompt": TEXT, "max_tokens": len(TEXT)},
    "/v1/responses": {"input": TEXT},
}


class Storm:
    """Leaves at places that are as likely as each other, over the whole length of request and answer."""

    def __init__(self, server: Attacked, seed: int) -> None:
        self._server = server
        self._chance = Random(seed)

    async def streams(self, count: int) -> None:
        lengths = {}
        for path in BODIES:
            sent = request(self._server.url, path, {**BODIES[path], "stream": True})
            lengths[path] = (sent, len((await ask(self._server.url, sent)).data))

        async def leave() -> None:
            sent, length = self._chance.choice(list(lengths.values()))
            at = self._chance.randrange(len(sent) + length)
            if at < len(sent):
                await ask(self._server.url, sent, cut=at)
            else:
                await ask(self._server.url, sent, most=at - len(sent), patience=60)

        await some_at_once(leave, count, AT_ONCE)

    async def wholes(self, count: int) -> None:
        longest = 2 * PACE_S * len(TEXT)

        async def leave() -> None:
            path = self._chance.choice(list(BODIES))
            sent = request(self._server.url, path, BODIES[path])
            await ask(self._server.url, sent, patience=self._chance.uniform(0, longest))

        await some_at_once(leave, count, AT_ONCE)


def settled(server: Attacked, before: State) -> tuple[float, State]:
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


def run(streams: int = 10_000, wholes: int = 2_000, seed: int = 1) -> list[Row]:
    with attacked(interval=PACE_S) as server:
        storm = Storm(server, seed)
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.aborts", description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--wholes", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    rows = run(args.streams, args.wholes, args.seed)
    print(page(rows, f"seed {args.seed}").plain())
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
