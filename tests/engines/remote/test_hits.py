"""Conversations over several upstreams: what is found again there, beside what one server would find; and
where they go by what clients say of them."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import httpx
import pytest

from dragoman.engines.protocol import JobHandle
from dragoman.engines.remote import RemoteEngine
from dragoman.engines.scripted import CHATML, ByteTokenizer, ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job, Sink, Step
from tests.engines.remote.support import QUICK, ids_of, job_of, run, serving, steps_of

SESSIONS, TURNS, NEW = 16, 4, 200


def count_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids from the beginning on are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class PrefixCacheEngine(ScriptedEngine):
    """It says how much of each prompt it has had before, as an engine with a prefix cache does."""

    def __init__(self) -> None:
        super().__init__(say("an answer of some length"))
        self.seen: list[tuple[int, ...]] = []

    def submit(self, job: Job, sink: Sink) -> JobHandle:
        cached = max((count_alike(job.prompt, one) for one in self.seen), default=0)
        self.seen.append(job.prompt)

        def tell(step: Step) -> None:
            step.cached_tokens = cached if step.cached_tokens is not None else None
            sink(step)

        return super().submit(job, tell)


def hits(upstreams: int, at_once: int) -> int:
    """So many sessions have a turn at the same time; then the next ones, until all had theirs."""

    async def ask(engine: RemoteEngine, number: int, turn: int, prompt: list[int]) -> int:
        prompt += [(number * 31 + turn * 7 + index) % 250 for index in range(NEW)]
        steps = await steps_of(engine, job_of(prompt))
        prompt += ids_of(steps)
        return sum(step.cached_tokens or 0 for step in steps)

    async def work(engine: RemoteEngine) -> int:
        number, prompts = 0, [[9] * 100 for _ in range(SESSIONS)]
        for turn in range(TURNS):
            for first in range(0, SESSIONS, at_once):
                some = range(first, first + at_once)
                number += sum(await asyncio.gather(*(ask(engine, at, turn, prompts[at]) for at in some)))
        return number

    engines: Sequence[PrefixCacheEngine] = [PrefixCacheEngine() for _ in range(upstreams)]
    with serving(*engines) as urls:
        return run(urls, work)


@pytest.mark.parametrize("at_once", [1, 16])
def test_four_upstreams_find_what_one_would(at_once: int) -> None:
    assert hits(4, at_once) >= 0.95 * hits(1, at_once)


# What clients say of where a request belongs.


@contextmanager
def front_of(engines: Sequence[PrefixCacheEngine]) -> Iterator[httpx.Client]:
    with serving(*engines) as urls:
        remote = RemoteEngine.open(urls, ByteTokenizer(), QUICK)
        settings = Settings(port=0, store="memory", shutdown_grace=0)
        with background(remote, settings, template=CHATML) as url, httpx.Client(base_url=url) as client:
            yield client


def ask_chat(client: httpx.Client, text: str, headers: dict[str, str] | None = None, **more: Any) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}], **more}
    client.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()


def ask_response(client: httpx.Client, text: str, **more: Any) -> str:
    reply = client.post("/v1/responses", json={"model": "scripted", "input": text, **more})
    return str(reply.raise_for_status().json()["id"])


def by_header(client: httpx.Client, texts: Sequence[str]) -> None:
    for text in texts:
        ask_chat(client, text, {"X-Session-Id": "s1"})


def by_cache_key(client: httpx.Client, texts: Sequence[str]) -> None:
    for text in texts:
        ask_chat(client, text, prompt_cache_key="k1")


def by_conversation(client: httpx.Client, texts: Sequence[str]) -> None:
    result = client.post("/v1/conversations", json={}).raise_for_status().json()["id"]
    for text in texts:
        ask_response(client, text, conversation=result)


def by_previous_response(client: httpx.Client, texts: Sequence[str]) -> None:
    last = ask_response(client, texts[0])
    for text in texts[1:]:
        # Nothing of the prompt is the same.
        last = ask_response(client, text, previous_response_id=last, truncate_prompt_tokens=20)


def by_nothing(client: httpx.Client, texts: Sequence[str]) -> None:
    for text in texts:
        ask_chat(client, text)


@pytest.mark.parametrize(
    ("asking", "goes_together"),
    [
        (by_header, True),
        (by_cache_key, True),
        (by_conversation, True),
        (by_previous_response, True),
        (by_nothing, False),
    ],
)
def test_what_belongs_together_goes_together(
    asking: Callable[[httpx.Client, Sequence[str]], None], goes_together: bool
) -> None:
    engines = [PrefixCacheEngine() for _ in range(4)]
    with front_of(engines) as client:
        before = [len(engine.seen) for engine in engines]
        asking(client, [f"{number}{chr(97 + number)}" for number in range(8)])
    asked = [len(engine.seen) - count for engine, count in zip(engines, before, strict=True)]
    assert sum(asked) == 8
    assert (max(asked) == 8) is goes_together
