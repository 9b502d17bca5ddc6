"""An hour of everything that clients do, with the real model: and memory that comes to a rest.

What grows at first is meant to: keys and values are pages that are touched when they are first used, and
grammars are kept; long prompts and many schemas see to both before the hour begins. Other caches fill too.
All of it has a bound, which is reached in the first third; of the rest each minute is like the other.
"""

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from msgspec import Struct, field

from tests.support.own_server import RunningServer, served
from tests.support.wire import ask, request
from tests.torture.page import Row, progress, scaled

MINUTES = 60
AT_ONCE = 6
EACH_S = 1.0
KV_MEMORY = 1024
"""MiB for keys and values: enough for thousands of requests, and soon used."""
GRAMMARS = 240
"""That are asked for at a time, until they take no more memory."""
FILLED = 1.005
"""What is growth no more."""
FLAT = 0.02
SETTLED = 1 / 3
WORDS = (
    *("river", "stone", "lantern", "the", "of", "and", "winter", "seven", "boat", "letter", "Zürich", "東京"),
    *("carries", "opens", "under", "slowly", "red", "x1", "{}", "[0]", "question", "because", "harbour"),
)
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, TOKENIZE = "/v1/embeddings", "/tokenize"


class Observations(Struct):
    memory: list[float] = field(default_factory=list)
    """Resident bytes, once in a while."""
    statuses: Counter[int] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        return sum(count for status, count in self.statuses.items() if status >= 500)


class Traffic:
    """Requests of all kinds, each with words that nobody has said before."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._chance = Random(seed)
        self._last: list[str] = []
        """Ids of stored responses, which others continue."""
        self.statuses: Counter[int] = Counter()
        self._kinds: dict[Callable[[], Awaitable[None]], int] = {
            self._short: 25,
            self._streamed: 20,
            self._left: 15,
            self._schema: 12,
            self._tools: 8,
            self._kept: 10,
            self._vectors: 4,
            self._long: 3,
            self._big: 2,
            self._wrong: 5,
        }

    async def one(self) -> None:
        [kind] = self._chance.choices(list(self._kinds), list(self._kinds.values()))
        await kind()

    def _words(self, count: int) -> str:
        return " ".join(self._chance.choices(WORDS, k=count)) + f" {self._chance.random()}"

    def _chat(self, words: int, **more: Any) -> dict[str, Any]:
        rows = [{"role": "user", "content": self._words(words)}]
        return {"messages": rows, "max_tokens": self._chance.randrange(4, 40), **more}

    async def _post(self, path: str, body: dict[str, Any], **how: Any) -> bytes:
        heard = await ask(self._url, request(self._url, path, body), **how)
        if not how:
            self.statuses[heard.status] += 1
        return heard.body

    async def fill(self, server: RunningServer) -> None:
        """Until there is no page that was not used before, and no room for a grammar that is not needed."""
        await self._fill(server, lambda: self._post(COMPLETIONS, self._prompt(1500, 1)), AT_ONCE)
        await self._fill(server, self._schema, GRAMMARS)

    async def _fill(self, server: RunningServer, ask: Callable[[], Awaitable[Any]], count: int) -> None:
        before = 0.0
        while server.resident > FILLED * before:
            before = server.resident
            for _ in range(0, count, AT_ONCE):
                await asyncio.gather(*(ask() for _ in range(AT_ONCE)))

    def _prompt(self, words: int, tokens: int) -> dict[str, Any]:
        return {"prompt": self._words(words), "max_tokens": tokens}

    async def _short(self) -> None:
        await self._post(CHAT, self._chat(self._chance.randrange(1, 60)))

    async def _streamed(self) -> None:
        body = self._chat(20, stream=True, n=self._chance.choice((1, 1, 1, 2)), temperature=1)
        await self._post(CHAT, body)

    async def _left(self) -> None:
        """By a client that leaves after some bytes, or after a moment."""
        body = self._chat(self._chance.randrange(5, 300), stream=self._chance.random() < 0.5, max_tokens=200)
        how: dict[str, Any] = self._chance.choice(
            [{"most": self._chance.randrange(1, 3000)}, {"patience": self._chance.random()}, {"cut": 200}]
        )
        await self._post(CHAT, body, **how)

    async def _schema(self) -> None:
        """One of a thousand schemas, so that most grammars are compiled anew and some are not."""
        number = self._chance.randrange(1000)
        names = [f"field_{number}_{index}" for index in range(1 + number % 7)]
        fields = {name: {"type": "string", "maxLength": 8} for name in names}
        schema = {"type": "object", "properties": fields, "required": names, "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
        await self._post(CHAT, self._chat(10, response_format=form, max_tokens=60))

    async def _tools(self) -> None:
        number, count = self._chance.randrange(300), self._chance.randrange(1, 6)
        names = [f"tool_{number}_{index}" for index in range(count)]
        takes = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}}
        tools = [{"type": "function", "function": {"name": name, "parameters": takes}} for name in names]
        choice = self._chance.choice(("auto", "required"))
        await self._post(CHAT, self._chat(10, tools=tools, tool_choice=choice, max_tokens=60))

    async def _kept(self) -> None:
        body: dict[str, Any] = {"input": self._words(20), "max_output_tokens": 24, "store": True}
        if self._last and self._chance.random() < 0.6:
            body["previous_response_id"] = self._last.pop()
        data = await self._post(RESPONSES, body)
        value = json.loads(data).get("id") if data.startswith(b"{") else None
        if value and len(self._last) < 50:
            self._last.append(value)

    async def _vectors(self) -> None:
        texts = [self._words(self._chance.randrange(5, 400)) for _ in range(self._chance.randrange(1, 6))]
        await self._post(EMBEDDINGS, {"input": texts})

    async def _long(self) -> None:
        await self._post(COMPLETIONS, self._prompt(self._chance.randrange(300, 1500), 16))

    async def _big(self) -> None:
        """Megabytes: to be counted, or to be told that it is too much."""
        text = self._words(1000) * self._chance.randrange(50, 300)
        if self._chance.random() < 0.5:
            await self._post(TOKENIZE, {"prompt": text})
        else:
            await self._post(CHAT, {"messages": [{"role": "user", "content": text}]})

    async def _wrong(self) -> None:
        wrong: list[dict[str, Any]] = [{"temperature": "warm"}, {"unheard_of": 1}]
        await self._post(CHAT, self._chat(5, **self._chance.choice(wrong)))


async def _talk(server: RunningServer, seconds: float, seed: int) -> Observations:
    seen, traffic = Observations(), Traffic(server.url, seed)
    await traffic.fill(server)
    until = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < until:
            await traffic.one()

    clients = [asyncio.create_task(client()) for _ in range(AT_ONCE)]
    while (left := until - time.monotonic()) > 0:
        seen.memory.append(server.resident)
        progress(int(seconds - left), int(seconds), "seconds")
        await asyncio.sleep(min(EACH_S, left))
    await asyncio.gather(*clients)
    seen.statuses = traffic.statuses
    return seen


def by_minute(memory: list[float], minutes: int) -> list[float]:
    """The median of each: a body of megabytes that is there for a moment is no growth."""
    each = max(1, len(memory) // minutes)
    starts = range(0, len(memory) - each + 1, each)
    return [statistics.median(memory[start : start + each]) for start in starts]


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    seconds = scaled(60 * MINUTES, scale, least=30)
    with served("--store", "sqlite", "--kv-memory", str(KV_MEMORY)) as server:
        seen = asyncio.run(_talk(server, seconds, seed))
    minutes = by_minute(seen.memory, MINUTES)
    last = minutes[int(SETTLED * len(minutes)) :]
    apart = max(last) / min(last) - 1
    print("MiB, minute by minute:", *(f"{size / 2**20:.0f}" for size in minutes), dict(seen.statuses))
    what = f"{seconds / 60:.0f} minutes of mixed traffic with the real model"
    first, least, most = (f"{size / 2**20:,.0f}" for size in (minutes[0], min(last), max(last)))
    size = f"{first} MiB at first, then {least} to {most}: {apart:.1%}"
    return [
        Row(f"{what}: resident memory of the last two thirds", size, f"{FLAT:.0%}", apart <= FLAT),
        Row(f"{what}: failures of the server", f"{seen.failed}", "0", not seen.failed),
    ]
