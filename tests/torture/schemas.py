"""`python -m tests.torture.schemas`: random schemas, a real model at temperature 1, and not one wrong answer.

Each schema is asked for twice, whole and streamed: as a required tool call and as response_format with the
model's own dialect, then as a required call in every dialect in turn.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import httpx
from msgspec import Struct

from dragoman.dialects.registry import dialects
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.weights import default_model
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.engines import Shared
from tests.support.messages import message_of, told
from tests.support.random_schemas import schema, tools, wrong_calls, wrong_text

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


class Tally:
    def __init__(self, wanted: int) -> None:
        self.wanted, self.done, self.began = wanted, 0, time.time()
        self.valid: dict[str, int] = {}
        self.asked: dict[str, int] = {}
        self.problems: list[str] = []

    def add(self, group: str, case: Case, problem: str | None) -> None:
        self.done += 1
        self.asked[group] = self.asked.get(group, 0) + 1
        self.valid[group] = self.valid.get(group, 0) + (problem is None)
        if problem is not None:
            self.problems.append(f"{group}, {case}: {problem[:600]}")
            print("\n" + self.problems[-1], flush=True)
        bar = "#" * (40 * self.done // self.wanted)
        seconds = time.time() - self.began
        print(
            f"\r[{bar:<40}] {self.done:>6,} of {self.wanted:,} answers, {seconds:.0f} s", end="", flush=True
        )


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


async def run(url: str, group: str, cases: Sequence[Case], tally: Tally) -> None:
    free = asyncio.Semaphore(STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(case: Case) -> None:
            async with free:
                tally.add(group, case, await answer(client, case))

        await asyncio.gather(*map(one, cases))


def plan(options: argparse.Namespace) -> Iterator[tuple[str, str, list[Case]]]:
    """A dialect to serve, what the cases are called, and the cases."""
    seeds = range(options.seed, options.seed + options.schemas)
    for kind in ("required", "json_schema") if options.schemas else ():
        yield "auto", kind, [Case(kind, seed, stream) for seed in seeds for stream in (False, True)]
    for name in options.dialect or dialects():
        first = options.seed + 1_000_000
        cases = [Case("required", first + number, number % 2 == 1) for number in range(options.each)]
        if cases:
            yield name, f"required in {name}", cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=200, help="for each of the two kinds [default: 200]")
    parser.add_argument("--each", type=int, default=20, help="for each dialect [default: 20]")
    parser.add_argument("--dialect", action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="compute threads")
    options = parser.parse_args()
    made = LocalOptions(name="model", context=2048, slots=STREAMS, threads=options.threads)
    engine = LocalEngine.open(default_model(), made)
    groups = list(plan(options))
    tally = Tally(sum(len(cases) for _, _, cases in groups))
    try:
        for dialect, group, cases in groups:
            with background(Shared(engine), Settings(port=0, dialect=dialect, log_level="error")) as url:
                asyncio.run(run(url, group, cases, tally))
    finally:
        engine.close()
    print()
    for group, asked in tally.asked.items():
        print(f"{group:<40} {tally.valid[group]:>5} of {asked} valid")
    print(f"{len(tally.problems)} of {tally.done} answers are wrong")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
