"""What a turn of an agent costs as its conversation grows: 128 turns to 69,000 tokens, with tools of 20 KB.

Everything but the model: reading the request, rendering, marking, encoding, and the answer's way back. The
engine says what the loop has it say. In process and over HTTP it is the processor time of the server; the
first token is on the client's clock. The peer reads, renders and encodes by vLLM's and transformers' code.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench import machine, vllm_peers
from bench.agent_loop import TOKENIZER, Loop, make_loop, make_tokenizer, templates
from bench.client import Flight
from bench.errors import BenchError, told
from bench.process import ROOT, Server
from bench.servers.agent import AgentEngine
from bench.tables import Table, keep, ratio
from dragoman.http.app import App
from dragoman.settings import Settings

PATH = "/v1/chat/completions"
NAMES = [
    "Qwen-Qwen3",
    "openai-gpt-oss",
    "meta-llama-Llama-3.1",
    "deepseek-ai-DeepSeek-V3.1",
    "GLM",
    "Mistral",
]
EARLY = 10
"""The turn that the last one is held against."""
AROUND = 3
"""Turns of which the median counts: from turn 10 on, because bodies before it are read in another way; and up
to the last one."""


class Options(Struct, frozen=True):
    turns: int = 128
    words: int = 130
    rounds: int = 2


QUICK = Options(turns=32, rounds=1)


class Case(Struct):
    """One template: milliseconds for each turn, of the quickest round."""

    template: str
    tokens: int = 0
    inside: list[float] = []
    http: list[float] = []
    first: list[float] = []
    peer: list[float] = []


async def ask(app: App, body: bytes) -> bytes:
    """One request to the app, without a socket."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    said: list[bytes] = []

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None:
        said.append(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": PATH, "raw_path": PATH.encode()}
    scope |= {"query_string": b"", "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    await app(scope, receive, send)
    return b"".join(said)


async def inside(folder: Path, loop: Loop, options: Options) -> tuple[list[float], int]:
    engine = AgentEngine(folder, loop, options.turns)
    app = App(engine, Settings(store="none"))
    await app.host.start()
    costs = []
    for turn in range(1, options.turns + 1):
        body = loop.body(turn, "agent")
        began = time.process_time()
        said = await ask(app, body)
        costs.append((time.process_time() - began) * 1000)
        if b"[DONE]" not in said:
            raise BenchError(f"Turn {turn} failed: {said[:300].decode(errors='replace')}")
    await app.host.stop()
    return costs, engine.prompts[-1]


def over_http(folder: Path, loop: Loop, options: Options) -> tuple[list[float], list[float]]:
    flags = ["--turns", str(options.turns), "--words", str(options.words)]
    costs, firsts = [], []
    with Server("agent", ["bench.servers.agent", str(folder), *flags]) as server:
        for turn in range(1, options.turns + 1):
            body, before = loop.body(turn, server.model), server.cpu_s()
            trace = Flight(server.port, [body]).finish()[0]
            costs.append((server.cpu_s() - before) * 1000)
            firsts.append((_first(trace.times, trace.data) - trace.sent) * 1000)
    return costs, firsts


def _first(times: Sequence[float], data: Sequence[bytes]) -> float:
    """When the first words came; the opening chunk has none."""
    found = (moment for moment, piece in zip(times, data, strict=True) if piece.count(b"data: ") > 1)
    return next(found, times[-1])


def peer(folder: Path, options: Options) -> list[float]:
    command = [vllm_peers.python(), "-m", "bench.agent_peer", str(folder)]
    command += [str(options.turns), str(options.words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        print(f"agent: no peer: {done.stderr.decode(errors='replace').splitlines()[-1:]}", flush=True)
        return []
    costs: list[float] = json.loads(done.stdout.splitlines()[-1])["costs"]
    return costs


def least(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Turn by turn, of the rounds that there are."""
    return [min(turn) for turn in zip(*rounds, strict=True)]


def measure(name: str, source: str, tokenizer: Path, options: Options) -> Case:
    loop, case = make_loop(options.turns, options.words), Case(name)
    with tempfile.TemporaryDirectory() as made:
        folder = make_tokenizer(tokenizer, source, Path(made))
        print(f"agent: {name}", flush=True)
        runs = [asyncio.run(inside(folder, loop, options)) for _ in range(options.rounds)]
        case.inside, case.tokens = least([costs for costs, _ in runs]), runs[0][1]
        served = [over_http(folder, loop, options) for _ in range(options.rounds)]
        case.http, case.first = least([costs for costs, _ in served]), least([first for _, first in served])
        case.peer = peer(folder, options)
    return case


def both(costs: Sequence[float]) -> tuple[float, float]:
    """The medians of a few turns from the early one on, and of the last ones, where there are any."""
    early = costs[EARLY - 1 :][:AROUND]
    return (statistics.median(early), statistics.median(costs[-AROUND:])) if early else (0.0, 0.0)


def table(cases: Sequence[Case], options: Options, where: str) -> Table:
    turns = (f"turn {EARLY}", f"turn {options.turns}", "grows")
    head = ("template", "tokens", *turns, "HTTP", "grows", "first token", "grows", "vLLM's way", "of it")
    return Table(
        "The price of an agent's turn, in ms of processor time",
        head,
        [_row(case) for case in cases],
        [
            f"The least of {options.rounds} rounds, medians of {AROUND} turns. {where}.",
            f"`grows` is the last turns over those from {EARLY} on; what follows is of the last ones:"
            " vLLM's way is reading, rendering and encoding; ours is all but the model.",
        ],
    )


def _row(case: Case) -> list[str]:
    early, last = both(case.inside)
    figures = [f"{early:.1f}"]
    for first, now in ((early, last), both(case.http), both(case.first)):
        figures += [f"{now:.1f}", ratio(now, first)]
    theirs = both(case.peer)[1]
    figures += [f"{theirs:.0f}", ratio(last, theirs)] if case.peer else ["-", "-"]
    return [case.template, f"{case.tokens:,}", *figures]


def main(options: Options, folder: Path | None, tokenizer: Path, names: list[str]) -> None:
    if not (tokenizer / "tokenizer.json").exists():
        raise BenchError(f"There is no tokenizer in {tokenizer}; name a folder of one with --tokenizer.")
    where = machine.describe()
    cases = []
    for name, source in templates(folder, names).items():
        try:
            cases.append(measure(name, source, tokenizer, options))
        except BenchError as error:
            # Some templates take no calls, or no tools.
            print(f"agent: {name} is left out: {error}", flush=True)
    keep("agent", cases, [table(cases, options, where)])


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.agent", description=__doc__)
    parser.add_argument("--templates", metavar="DIR", type=Path, help="a folder of *.jinja [default: ChatML]")
    parser.add_argument("--only", action="append", metavar="NAME", help="templates whose names begin so")
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, default=TOKENIZER, help="of Hugging Face")
    parser.add_argument("--turns", type=int, help="turns of the loop [default: 128]")
    parser.add_argument("--rounds", type=int, help="how often each is measured [default: 2]")
    parser.add_argument("--quick", action="store_true", help="a short run, for a first look")
    args = parser.parse_args()
    base = QUICK if args.quick else Options()
    options = Options(args.turns or base.turns, base.words, args.rounds or base.rounds)
    main(options, args.templates, args.tokenizer, args.only or NAMES)


if __name__ == "__main__":
    sys.exit(told(cli))
