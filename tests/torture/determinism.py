"""One seed gives one log of events: the whole server, in time that only passes when nothing is left to do."""

import asyncio
import json
import re
import selectors
from collections.abc import Callable, Coroutine, Sequence
from itertools import zip_longest
from random import Random
from typing import Any, TypeVar

from msgspec import Struct
from starlette.types import Message

from dragoman.engines.scripted import Script, say
from dragoman.http.app import App
from dragoman.limits import Limits
from dragoman.settings import Settings
from dragoman.types import Job
from tests.support.parrot import FAULTS, START_ID, call, parrot, repeated
from tests.torture.bleed import CHAT, COMPLETIONS, RESPONSES
from tests.torture.page import Row, scaled

T = TypeVar("T")
REQUESTS = 2_000
PACE_S, MEAN_S = 0.01, 0.02
"""The pace of the model, and the mean time between two requests."""
SETTINGS = Settings(store="none", log_level="error", limits=Limits(in_flight=8, queue=8))
DRAWN = re.compile(rb"[0-9a-f]{24,}")
CLOCK = re.compile(rb'"(created|created_at|completed_at)":\d+')


class _Selector(selectors.DefaultSelector):
    """Instead of waiting, time goes on to when the wait would be over."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            # Nothing is planned: a thread is at work.
            return super().select(None)
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class PlannedRequest(Struct, frozen=True):
    """One request of the plan."""

    at: float
    path: str
    body: bytes
    leaves_at: float
    pause: float
    """What the client takes to read one piece."""


def plan(count: int, seed: int) -> list[PlannedRequest]:
    """Good and bad, patient and not, with faults of the engine, more at once than there is room for."""
    chance, at, requests = Random(seed), 0.0, []
    for _ in range(count):
        at += chance.expovariate(1 / MEAN_S)
        path, body = _body(chance)
        leaves_at = at + (chance.uniform(0, 1.0) if chance.random() < 0.2 else 600.0)
        pause = chance.choice([0.0, 0.0, 0.0, 0.003])
        requests.append(PlannedRequest(at, path, json.dumps(body).encode(), leaves_at, pause))
    return requests


def _body(chance: Random) -> tuple[str, dict[str, Any]]:
    text = "".join(chance.choices("abc é<>", k=chance.randrange(1, 60)))
    text += chance.choice(["", "", "", *FAULTS, call("look", at=text)])
    path = chance.choice([CHAT, CHAT, COMPLETIONS, RESPONSES])
    body: dict[str, Any] = {"stream": chance.random() < 0.7, "timeout": chance.choice([0.2, 1.0, 5.0])}
    if path == COMPLETIONS:
        return path, {**body, "prompt": text, "n": chance.randrange(4), "max_tokens": 20}
    if path == RESPONSES:
        return path, {**body, "input": text, "store": False}
    tools = [{"type": "function", "function": {"name": "look"}}]
    kinds: list[dict[str, Any]] = [{}, {"stop": ["b"]}, {"n": 2}, {"tools": tools}, {"logprobs": True}]
    return path, {**body, **chance.choice(kinds), "messages": [{"role": "user", "content": text}]}


def _answer(job: Job) -> Script:
    """A prompt that is no conversation is said again as it is."""
    return repeated(job) if START_ID in job.prompt else say(bytes(job.prompt).decode())


def log(count: int, seed: int) -> list[str]:
    """Who was told what, and when."""
    return in_virtual_time(_log(plan(count, seed)))


async def _log(plan: Sequence[PlannedRequest]) -> list[str]:
    app, lines = App(parrot(interval=PACE_S, answer=_answer), SETTINGS), list[str]()
    names: dict[bytes, bytes] = {}

    def told(number: int, message: Message) -> None:
        data = CLOCK.sub(b"", message.get("body") or repr(message).encode())
        # Ids are drawn anew each time, so each is named by when it was first seen.
        data = DRAWN.sub(lambda id_: names.setdefault(id_[0], b"#%d" % len(names)), data)
        now = asyncio.get_running_loop().time()
        lines.append(f"{now:.6f} {number} {message['type']} {data.decode()}")

    await asyncio.gather(*(_client(app, asked, number, told) for number, asked in enumerate(plan)))
    return lines


async def _client(app: App, asked: PlannedRequest, number: int, told: Callable[[int, Message], None]) -> None:
    await asyncio.sleep(asked.at)
    left = asyncio.Event()
    asyncio.get_running_loop().call_at(asked.leaves_at, left.set)
    sent: list[Message] = [{"type": "http.request", "body": asked.body}]

    async def receive() -> Message:
        if sent:
            return sent.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        told(number, message)
        await asyncio.sleep(asked.pause)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": asked.path, "query_string": b"", "headers": headers}
    await app(scope, receive, send)


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    count = scaled(REQUESTS, scale)
    first, again = log(count, seed), log(count, seed)
    differ = sum(one != other for one, other in zip_longest(first, again))
    what = f"{count:,} requests, twice with one seed: events that differ"
    return [Row(what, f"{differ} of {len(first):,}", "0", differ == 0 and len(first) >= count)]
