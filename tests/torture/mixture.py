"""Everything there is, mixed, for as many requests as a day has seconds: and nothing that grows."""

import asyncio
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct, field

from tests.attacks.bodies import GENERATING, GOOD, SOCKET, good
from tests.attacks.frame import PAUSE, RESUME, AttackedServer, attacked
from tests.attacks.server import State
from tests.support.wire import ask, request, some_at_once
from tests.torture.page import Row, progress, scaled

REQUESTS = 86_400
SAMPLES = 100
AT_ONCE = 32
PATIENCE_S = 60.0
SETTLED = 0.2
"""The share after which all that is made once has been made."""
MOST_MB = 1.0
KEPT = "/v1/responses"
ROUTES = [route for route in GOOD if route not in (SOCKET, PAUSE, RESUME)]
BAD: list[dict[str, Any]] = [
    {"messages": 5},
    {"input": {"a": 1}},
    {"temperature": "warm"},
    {"unheard_of": True},
    {"max_tokens": -1},
]


class MixtureFigures(Struct):
    states: list[State] = field(default_factory=list)
    """At rest, after each hundredth of the requests."""
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        return sum(count for status, count in self.statuses.items() if status >= 500)


class Mixture:
    """Sends one request after the other, each of some kind."""

    def __init__(self, server: AttackedServer, seed: int) -> None:
        self._server = server
        self._chance = Random(seed)
        self._last = ""
        """The id of a stored response, which others continue."""
        self.statuses: Counter[int] = Counter()
        self._kinds: dict[Callable[[], Awaitable[None]], int] = {
            self._good: 40,
            self._streamed: 25,
            self._bad: 10,
            self._left: 10,
            self._kept: 10,
            self._read: 4,
            self._socket: 1,
        }

    async def one(self) -> None:
        [kind] = self._chance.choices(list(self._kinds), list(self._kinds.values()))
        await kind()

    async def _post(self, route: str, body: dict[str, Any], **how: Any) -> bytes:
        sent = request(self._server.url, self._server.path(route), body)
        heard = await ask(self._server.url, sent, **how)
        self.statuses[heard.status] += 1
        return heard.body

    async def _good(self) -> None:
        route = self._chance.choice(ROUTES)
        await self._post(route, good(route))

    async def _streamed(self) -> None:
        route = self._chance.choice([route for route in GENERATING if route != SOCKET])
        await self._post(route, {**good(route), "stream": True})

    async def _bad(self) -> None:
        route = self._chance.choice(ROUTES)
        await self._post(route, {**good(route), **self._chance.choice(BAD)})

    async def _left(self) -> None:
        """By a client that leaves after some bytes, or after a moment."""
        route = self._chance.choice([route for route in GENERATING if route != SOCKET])
        body = {**good(route), "stream": self._chance.random() < 0.5}
        how: dict[str, Any] = self._chance.choice(
            [
                {"most": self._chance.randrange(2000)},
                {"patience": 0.002},
                {"cut": self._chance.randrange(300)},
            ]
        )
        await self._post(route, body, **how)

    async def _kept(self) -> None:
        """A new one, or one that continues the last."""
        body = {**good(KEPT), "store": True}
        if self._last and self._chance.random() < 0.8:
            body["previous_response_id"] = self._last
        result = json.loads(await self._post(KEPT, body))
        self._last = result.get("id", "")

    async def _read(self) -> None:
        path = f"{KEPT}/{self._last}" if self._last else "/v1/models"
        host = urlsplit(self._server.url).netloc
        head = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        self.statuses[(await ask(self._server.url, head.encode())).status] += 1

    async def _socket(self) -> None:
        reply = await asyncio.to_thread(self._server.send, SOCKET, good(SOCKET))
        self.statuses[reply.status] += 1


def run_mixture(requests: int, samples: int, seed: int) -> MixtureFigures:
    seen = MixtureFigures()
    with tempfile.TemporaryDirectory() as folder, attacked(store="sqlite", data_dir=folder) as server:
        for route in ROUTES:
            server.send(route, good(route))
        mixture = Mixture(server, seed)
        for number in range(samples):
            asyncio.run(some_at_once(mixture.one, requests // samples, AT_ONCE))
            seen.states.append(at_rest(server))
            progress(number + 1, samples, f"parts of {requests:,} requests")
        seen.statuses = mixture.statuses
    return seen


def at_rest(server: AttackedServer) -> State:
    """When nothing runs, and connections that were left are closed."""
    until, state, before = time.monotonic() + PATIENCE_S, server.state(), None
    while (state.live or _held(state) != before) and time.monotonic() < until:
        before = _held(state)
        time.sleep(0.05)
        state = server.state()
    return state


def _held(state: State) -> tuple[int, int]:
    return state.tasks, state.descriptors


def growth(states: list[State], requests: int) -> float:
    """Bytes for ten thousand requests, once all has settled."""
    each = requests / len(states) / 10_000
    later = [(number * each, state.memory) for number, state in enumerate(states)]
    later = later[int(SETTLED * len(later)) :]
    return statistics.linear_regression(*zip(*later, strict=True)).slope


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    requests = scaled(REQUESTS, scale, least=10_000)
    seen = run_mixture(requests, SAMPLES, seed)
    slope = growth(seen.states, requests) / 2**20
    settled = seen.states[int(SETTLED * SAMPLES)]
    last = seen.states[-1]
    more = (last.tasks - settled.tasks, last.descriptors - settled.descriptors)
    what = f"{requests:,} mixed requests"
    return [
        Row(f"{what}: memory for 10,000", f"{slope:+.2f} MB", f"<= {MOST_MB:g} MB", slope <= MOST_MB),
        Row(
            f"{what}: what is held",
            f"{more[0]:+d} tasks, {more[1]:+d} descriptors",
            "as before",
            max(more) <= 0,
        ),
        Row(f"{what}: failures of the server", f"{seen.failed}", "0", not seen.failed),
    ]
