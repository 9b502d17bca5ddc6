"""Random schemas, a real model at temperature 1, and not one wrong answer.

Each schema is asked for twice, whole and streamed: as a required tool call and as response_format with the
model's own dialect, then as a required call in every dialect in turn.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import httpx
from msgspec import Struct, field

from dragoman.dialects.registry import list_dialects
from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.engines import RUNNER, SharedEngine
from tests.support.messages import message_of, told
from tests.support.random_schemas import schema, tools, wrong_calls, wrong_text
from tests.torture.page import Row, progress, scaled

SCHEMAS, EACH = 200, 20
"""For each of the two kinds, and for each dialect."""
STREAMS = 8
MAX_TOKENS = 700
PATH = "/v1/chat/completions"


class Case(Struct, frozen=True):
    kind: str
    seed: int
    stream: bool

    def fields(self) -> dict[str, Any]:
        chance = Random(self.seed)
        if self.kind == "required":
            return {
                "tools": tools(chance),
                "tool_choice": "required",
                "parallel_tool_calls": self.seed % 8 == 0,
            }
        named = {"name": "answer", "schema": schema(chance)}
        return {"response_format": {"type": "json_schema", "json_schema": named}}

    def wrong(self, message: dict[str, Any], finish: str) -> str | None:
        chance = Random(self.seed)
        if self.kind == "required":
            calls = told(message)
            # Where several are allowed a small model may go on calling: the length cuts the last one off.
            several = finish == "length" and len(calls) > 1
            return wrong_calls(calls[:-1] if several else calls, tools(chance))
        return wrong_text(message["content"], schema(chance))


class Tally(Struct):
    wanted: int
    done: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, group: str, case: Case, problem: str | None) -> None:
        self.done += 1
        if problem is not None:
            self.problems.append(f"{group}, {case}: {problem[:600]}")
            print(self.problems[-1], flush=True)
        progress(self.done, self.wanted, "answers")


async def answer(client: httpx.AsyncClient, case: Case) -> str | None:
    """What is wrong with one answer; None: nothing."""
    body = {
        "messages": [{"role": "user", "content": "Do something sensible, and be brief."}],
        "max_tokens": MAX_TOKENS,
        "seed": case.seed,
        # A small model that has begun to reason does not find an end before its tokens do.
        "reasoning_effort": "none",
        "stream": case.stream,
        **case.fields(),
    }
    response = await client.post(PATH, json=body)
    if response.status_code != 200:
        return f"HTTP {response.status_code}: {response.text}"
    if case.stream:
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n")]
        message = message_of(json.loads(event) for event in events if event.startswith("{"))
        finish = message["finish_reason"]
    else:
        [choice] = response.json()["choices"]
        message, finish = choice["message"], choice["finish_reason"]
    problem = case.wrong(message, finish)
    return problem and f"finish_reason {finish}, {problem}"


async def asked(url: str, group: str, cases: Sequence[Case], tally: Tally) -> None:
    free = asyncio.Semaphore(STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(case: Case) -> None:
            async with free:
                tally.add(group, case, await answer(client, case))

        await asyncio.gather(*map(one, cases))


def plan(schemas: int, each: int, seed: int) -> Iterator[tuple[str, str, list[Case]]]:
    """A dialect to serve, what the cases are called, and the cases."""
    for kind in ("required", "json_schema"):
        seeds = range(seed, seed + schemas)
        yield "auto", kind, [Case(kind, seed, stream) for seed in seeds for stream in (False, True)]
    for name in list_dialects():
        first = seed + 1_000_000
        yield (
            name,
            f"required in {name}",
            [Case("required", first + n, n % 2 == 1) for n in range(each)],
        )


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    groups = list(plan(scaled(SCHEMAS, scale), scaled(EACH, scale), seed))
    tally = Tally(sum(len(cases) for _, _, cases in groups))
    options = LocalOptions(runner=RUNNER, name="model", context=2048, slots=STREAMS)
    engine = LocalEngine.open(default_model(), options)
    try:
        for dialect, group, cases in groups:
            with background(
                SharedEngine(engine), Settings(port=0, dialect=dialect, log_level="error")
            ) as url:
                asyncio.run(asked(url, group, cases, tally))
    finally:
        engine.close()
    what = f"{tally.done:,} answers to random schemas, in {len(list_dialects())} dialects: not valid"
    return [Row(what, f"{len(tally.problems)}", "0", not tally.problems)]
