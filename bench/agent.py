"""What a turn of an agent costs as its conversation grows: 128 turns to 69,000 tokens, with tools of 20 KB.

Everything but the model: reading the request, rendering, marking, encoding, and the answer's way back. The
engine says what the loop has it say. In process and over HTTP it is the processor time of the server; the
first token is on the client's clock. The peers read, render and encode: by vLLM's and transformers' code
(agent_peer.py), and in llama.cpp's own server (agent_llamacpp.py).
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench import agent_llamacpp, machine, ratios
from bench.agent_loop import TOKENIZER, Loop, make_loop, make_tokenizer, templates
from bench.agent_peer import Peer
from bench.client import Flight
from bench.errors import BenchError, told
from bench.process import Server
from bench.ratios import Ratio
from bench.servers.agent import AgentEngine
from bench.tables import Table, keep, ratio
from dragoman.http.app import App
from dragoman.settings import Settings

PATH = "/v1/chat/completions"
EARLY = 10
"""The turn that the last one is held against."""
AROUND = 3
"""Turns of which the median counts: from turn 10 on, because bodies before it are read in another way; and up
to the last one."""


class Options(Struct, frozen=True):
    turns: int = 128
    words: int = 130
    rounds: int = 2
    peers: bool = True


QUICK = Options(turns=32, rounds=1)
MOST_MS, MOST_GROWTH = 10.0, 1.5
"""What a turn should stay within."""


class Case(Struct):
    """One template: milliseconds for each turn, of the quickest round."""

    template: str
    tokens: int = 0
    inside: list[float] = []
    http: list[float] = []
    first: list[float] = []
    vllm: list[float] = []
    llamacpp: list[float] = []
    """Of the peers, the turns that count."""


async def ask(app: App, body: bytes) -> bytes:
    """One request to the app, without a socket."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    chunks: list[bytes] = []

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None:
        chunks.append(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": PATH, "raw_path": PATH.encode()}
    scope |= {"query_string": b"", "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    await app(scope, receive, send)
    return b"".join(chunks)


async def inside(folder: Path, loop: Loop, options: Options) -> tuple[list[float], int]:
    engine = AgentEngine(folder, loop, options.turns)
    app = App(engine, Settings(store="none"))
    await app.host.start()
    costs = []
    for turn in range(1, options.turns + 1):
        body = loop.body(turn, "agent")
        began = time.process_time()
        data = await ask(app, body)
        costs.append((time.process_time() - began) * 1000)
        if b"[DONE]" not in data:
            raise BenchError(f"Turn {turn} failed: {data[:300].decode(errors='replace')}")
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
    """When the first words came; the opening event, which may leave by itself, has none."""
    events = accumulate(piece.count(b"data: ") for piece in data)
    return next((moment for moment, count in zip(times, events, strict=True) if count > 1), times[-1])


def turns_that_count(options: Options) -> list[int]:
    """Who keeps nothing between turns need not be asked all of them."""
    return [*range(EARLY, EARLY + AROUND), *range(options.turns - AROUND + 1, options.turns + 1)]


def of_llamacpp(source: str, folder: Path, loop: Loop, options: Options) -> list[float]:
    try:
        return agent_llamacpp.measure(source, folder, loop, turns_that_count(options))
    except BenchError as error:
        # It has a Jinja of its own, which does not take all templates.
        print(f"agent: without llama.cpp: {error}", flush=True)
        return []


def least(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Turn by turn, of the rounds that there are."""
    return [min(turn) for turn in zip(*rounds, strict=True)]


def measure(name: str, source: str, tokenizer: Path, options: Options, vllm: Peer | None) -> Case:
    loop, case = make_loop(options.turns, options.words), Case(name)
    with tempfile.TemporaryDirectory() as text:
        folder = make_tokenizer(tokenizer, source, Path(text))
        runs = [asyncio.run(inside(folder, loop, options)) for _ in range(options.rounds)]
        case.inside, case.tokens = least([costs for costs, _ in runs]), runs[0][1]
        served = [over_http(folder, loop, options) for _ in range(options.rounds)]
        case.http, case.first = least([costs for costs, _ in served]), least([first for _, first in served])
        if vllm is not None:
            case.vllm = vllm.measure(folder)
        if options.peers:
            case.llamacpp = of_llamacpp(source, folder, loop, options)
    return case


def both(costs: Sequence[float]) -> tuple[float, float]:
    """The medians of a few turns from the early one on, and of the last ones, where there are any."""
    early = costs[EARLY - 1 :][:AROUND]
    return (statistics.median(early), statistics.median(costs[-AROUND:])) if early else (0.0, 0.0)


def head(options: Options) -> list[str]:
    ours = [f"turn {EARLY}", f"turn {options.turns}", "grows", "HTTP", "grows", "first token", "grows"]
    return ["template", "tokens", *ours, "vLLM's way", "llama.cpp", "the faster takes"]


def _row(case: Case) -> list[str]:
    early, last = both(case.inside)
    figures = [f"{early:.1f}"]
    for first, now in ((early, last), both(case.http), both(case.first)):
        figures += [f"{now:.1f}", ratio(now, first)]
    theirs = [statistics.median(peer[-AROUND:]) if peer else None for peer in (case.vllm, case.llamacpp)]
    known = [cost for cost in theirs if cost is not None]
    figures += ["-" if cost is None else f"{cost:.0f}" for cost in theirs]
    return [case.template, f"{case.tokens:,}", *figures, f"{min(known) / last:.1f}x" if known else "-"]


def table(cases: Sequence[Case], options: Options, where: str) -> Table:
    return Table(
        "The price of an agent's turn, in ms of processor time",
        head(options),
        [_row(case) for case in cases],
        [
            f"The least of {options.rounds} rounds, medians of {AROUND} turns. {where}.",
            f"`grows` is the last turns over those from {EARLY} on; what follows is of the last ones:"
            " reading, rendering and encoding by vLLM's and transformers' code, and in llama.cpp's server"
            " (with the grammar of the tools); ours is all but the model.",
        ],
    )


def summary(cases: Sequence[Case]) -> Table:
    """The middle and the most of all templates, and who is above what a turn should stay within."""
    ways = {"in process": "inside", "over HTTP": "http", "first token": "first"}
    rows = []
    for way, name in ways.items():
        fields = {case.template: both(getattr(case, name)) for case in cases}
        costs = {template: last for template, (_, last) in fields.items()}
        growths = {template: last / early for template, (early, last) in fields.items() if early}
        rows += [_extremes(f"{way}, ms", costs, MOST_MS), _extremes(f"{way}, grows", growths, MOST_GROWTH)]
    return Table("All templates", ("last turns", "median", "most", "of", "above"), rows)


def _extremes(what: str, fields: dict[str, float], most: float) -> list[str]:
    worst = max(fields, key=lambda name: fields[name], default="")
    above = [name for name, value in fields.items() if value > most]
    middle = statistics.median(fields.values()) if fields else 0.0
    return [what, f"{middle:.2f}", f"{fields.get(worst, 0):.2f}", worst, ", ".join(above) or "none"]


def compared(cases: Sequence[Case]) -> Iterator[Ratio]:
    """The last turns, in process, beside each peer's and the faster one's."""
    for case in cases:
        ours = both(case.inside)[1]
        peers = {"vLLM's way": case.vllm, "llama.cpp": case.llamacpp}
        last = {name: statistics.median(costs[-AROUND:]) for name, costs in peers.items() if costs}
        if last:
            last["the faster peer"] = min(last.values())
        for name, theirs in last.items():
            yield Ratio(f"{case.template}, {name}", "ms", [ours], [theirs], less_is_better=True)
    turns = [both(case.inside)[1] for case in cases]
    grown = [last / early for early, last in (both(case.inside) for case in cases)]
    yield Ratio("all templates, growth", "", [statistics.median(grown)], [1.0], less_is_better=True)
    known = [statistics.median(case.vllm[-AROUND:]) for case in cases if case.vllm]
    if known:
        medians = [statistics.median(turns)], [statistics.median(known)]
        yield Ratio("all templates, vLLM's way", "ms", *medians, less_is_better=True)


def main(options: Options, folder: Path | None, tokenizer: Path, names: list[str]) -> None:
    if not (tokenizer / "tokenizer.json").exists():
        raise BenchError(f"There is no tokenizer in {tokenizer}; name a folder of one with --tokenizer.")
    where = machine.describe()
    cases = []
    with ExitStack() as stack:
        peer = Peer(options.turns, options.words, turns_that_count(options)) if options.peers else None
        vllm = stack.enter_context(peer) if peer else None
        print("agent:", *head(options), sep=" | ", flush=True)
        for name, source in templates(folder, names).items():
            try:
                cases.append(measure(name, source, tokenizer, options, vllm))
                print("agent:", *_row(cases[-1]), sep=" | ", flush=True)
            except BenchError as error:
                print(f"agent: {name} is left out: {error}", flush=True)
    keep("agent", cases, [table(cases, options, where), summary(cases)])
    ratios.write("agent", compared(cases))


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.agent", description=__doc__)
    parser.add_argument("--templates", metavar="DIR", type=Path, help="a folder of *.jinja [default: ChatML]")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="templates whose names begin so [default: all]"
    )
    parser.add_argument("--tokenizer", metavar="DIR", type=Path, default=TOKENIZER, help="of Hugging Face")
    parser.add_argument("--turns", type=int, help="turns of the loop [default: 128]")
    parser.add_argument("--rounds", type=int, help="how often each is measured [default: 2]")
    parser.add_argument("--quick", action="store_true", help="a short run, for a first look")
    parser.add_argument("--alone", action="store_true", help="without the peers")
    args = parser.parse_args()
    base = QUICK if args.quick else Options()
    options = Options(args.turns or base.turns, base.words, args.rounds or base.rounds, not args.alone)
    main(options, args.templates, args.tokenizer, args.only or [""])


if __name__ == "__main__":
    sys.exit(told(cli))
