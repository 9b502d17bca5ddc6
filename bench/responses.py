"""Responses and Messages beside Chat Completions, what the store takes, and how soon a broken stream goes on.

Streams are compared as in `bench.stream`: one server, one engine without a model, one token per stream and
step, which is one event of each API. A response is stored unless it says otherwise, so both are shown.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from msgspec import Struct

from bench import machine, ratios
from bench.answers import read
from bench.client import Flight
from bench.errors import told
from bench.process import Server
from bench.ratios import Ratio
from bench.stream import body as chat_body
from bench.stream import check, flow_s
from bench.tables import Table, keep, ratio
from dragoman.store import Record, StoredItem, StoreLimits
from dragoman.store.sqlite import SqliteStore

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
WAYS = {
    "Chat Completions": CHAT,
    "Messages": MESSAGES,
    "Responses, not stored": RESPONSES,
    "Responses, stored": RESPONSES,
}
SERVER = "bench.servers.scripted"


class Options(Struct, frozen=True):
    levels: Sequence[int] = (8, 64)
    tokens: int = 512
    rounds: int = 7
    writes: int = 2000
    events: int = 10_000


QUICK = Options(levels=(64,), tokens=256, rounds=3, writes=500)


class Rate(Struct, frozen=True):
    way: str
    streams: int
    tokens_per_s: float
    cpu_us: float
    rounds: list[float]
    """Tokens a second."""


class Writes(Struct, frozen=True):
    at_once: int
    per_s: float


class Resume(Struct, frozen=True):
    after: int
    ms: float


class Results(Struct, frozen=True):
    rates: list[Rate]
    writes: list[Writes]
    resumes: list[Resume]


def bodies(way: str, tokens: int) -> bytes:
    if WAYS[way] in (CHAT, MESSAGES):
        return chat_body(tokens)
    asked = {"model": "scripted", "input": "What is the answer?", "temperature": 0.0, "stream": True}
    return json.dumps({**asked, "store": way.endswith(", stored")}).encode()


def measure(server: Server, way: str, streams: int, tokens: int) -> tuple[float, float]:
    """Tokens a second, and microseconds of the server's processor for each."""
    flight = Flight(server.port, [bodies(way, tokens)] * streams, path=WAYS[way])
    flight.open()
    opened, cpu = time.perf_counter(), server.cpu_s()
    answers = [check(read(trace), tokens) for trace in flight.finish()]
    cpu = server.cpu_s() - cpu
    count = sum(answer.tokens for answer in answers)
    return count / flow_s(answers, opened), cpu / count * 1e6


def rates(options: Options) -> list[Rate]:
    """Ways take turns, so that noise hits all alike."""
    cores = machine.cores()
    os.sched_setaffinity(0, {cores[-1]})
    try:
        return [rate for streams in options.levels for rate in _level(options, streams, cores[0])]
    finally:
        os.sched_setaffinity(0, cores)


def _level(options: Options, streams: int, core: int) -> list[Rate]:
    flags = ["--streams", str(streams), "--tokens", str(options.tokens)]
    seen: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with Server("dragoman", [SERVER, *flags], core=core) as server:
        for way in WAYS:
            measure(server, way, streams, options.tokens)  # warms up
        for number in range(options.rounds):
            print(f"responses: {streams} streams, round {number + 1} of {options.rounds}", flush=True)
            for way, items in seen.items():
                items.append(measure(server, way, streams, options.tokens))
    return [
        Rate(
            way,
            streams,
            statistics.median(rate for rate, _ in result),
            statistics.median(cost for _, cost in result),
            [rate for rate, _ in result],
        )
        for way, result in seen.items()
    ]


def writes(options: Options) -> list[Writes]:
    return [asyncio.run(_writes(options.writes, at_once)) for at_once in (1, 64)]


async def _writes(count: int, at_once: int) -> Writes:
    """Responses of usual size into a file; each write is on the disk before it counts."""
    body, events = b'{"output":"%s"}' % (b"word " * 400), b"event: x\ndata: word\n\n" * 400
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder), StoreLimits())
        await store.open()
        numbers = iter(range(count))

        async def write() -> None:
            for number in numbers:
                item = (StoredItem(f"msg_{number}", body),)
                await store.save(
                    Record(
                        kind="response",
                        id=f"resp_{number}",
                        owner="",
                        created_at=number,
                        status="completed",
                        model="m",
                        body=body,
                        inputs=item,
                        events=events,
                    )
                )

        began = time.perf_counter()
        await asyncio.gather(*(write() for _ in range(at_once)))
        seconds = time.perf_counter() - began
        await store.close()
    return Writes(at_once, count / seconds)


def resumes(options: Options) -> list[Resume]:
    """A stored stream, from the beginning and from its middle: the time until all of it has come."""
    flags = ["--streams", "1", "--tokens", str(options.events)]
    with Server("dragoman", [SERVER, *flags]) as server, httpx.Client(timeout=60) as client:
        url = f"http://127.0.0.1:{server.port}{RESPONSES}"
        body = client.post(url, json={"model": "scripted", "input": "Go on."}).json()
        return [_resume(client, f"{url}/{body['id']}", after) for after in (0, options.events // 2)]


def _resume(client: httpx.Client, url: str, after: int) -> Resume:
    seen = []
    for _ in range(10):
        began = time.perf_counter()
        client.get(url, params={"stream": "true", "starting_after": str(after)}).raise_for_status()
        seen.append((time.perf_counter() - began) * 1e3)
    return Resume(after, statistics.median(seen[1:]))


def tables(results: Results, options: Options, where: str) -> list[Table]:
    chat = {rate.streams: rate.tokens_per_s for rate in results.rates if WAYS[rate.way] == CHAT}
    streamed = [
        (
            rate.way,
            str(rate.streams),
            f"{rate.tokens_per_s:,.0f}",
            f"{rate.cpu_us:.1f}",
            ratio(rate.tokens_per_s, chat[rate.streams]),
        )
        for rate in results.rates
    ]
    stored = [(f"{each.at_once} at once", f"{each.per_s:,.0f}") for each in results.writes]
    resumed = [(f"after event {each.after:,}", f"{each.ms:.1f}") for each in results.resumes]
    return [
        Table(
            "Responses and Messages beside Chat Completions",
            ("API", "streams", "tokens/s", "CPU \u00b5s/token", "of chat"),
            streamed,
            [f"Median of {options.rounds} rounds. {where}."],
        ),
        Table(
            "Responses that are stored, on disk before they count (SQLite)", ("writers", "writes/s"), stored
        ),
        Table(
            f"A stored stream of {options.events:,} tokens, resumed", ("from", "ms until all came"), resumed
        ),
    ]


def compared(result: Sequence[Rate]) -> Iterator[Ratio]:
    chat = {rate.streams: rate.rounds for rate in result if WAYS[rate.way] == CHAT}
    for rate in result:
        if WAYS[rate.way] != CHAT:
            yield Ratio(f"{rate.streams} streams, {rate.way}", "tokens/s", rate.rounds, chat[rate.streams])


def main(options: Options) -> None:
    results = Results(rates(options), writes(options), resumes(options))
    keep("responses", results, tables(results, options, machine.describe()))
    ratios.write("responses", compared(results.rates))


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.responses", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run, for a first look")
    main(QUICK if parser.parse_args().quick else Options())


if __name__ == "__main__":
    sys.exit(told(cli))
