"""The same vLLM with the same small model behind dragoman and behind vLLM's own servers.

The model costs next to nothing, so that what stands before it shows. All servers run all the time and take
turns, so that noise hits all alike. Every answer has its full length. The time of a frontend is the
processor time of everything that is not vLLM's core.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from msgspec import Struct

from bench import machine, ratios, vllm_peers
from bench.answers import Answer, read
from bench.client import Flight
from bench.errors import BenchError, told
from bench.figures import Load, load_of
from bench.process import Server
from bench.ratios import Ratio
from bench.serve import WORDS
from bench.tables import Table, keep, ratio
from bench.vllm_peers import OURS

CORE = "EngineCore"
"""How vLLM calls the process that computes."""


class Options(Struct, frozen=True):
    levels: Sequence[int] = (1, 32, 128)
    tokens: int = 128
    rounds: int = 5
    prompt: int = 24
    """Words of a prompt."""


QUICK = Options(levels=(1, 32), tokens=64, rounds=2)


class Round(Struct, frozen=True):
    server: str
    load: Load
    frontend_us: float
    """Processor time of the frontend for one token, in microseconds."""


def bodies(model: str, streams: int, options: Options, seed: str) -> list[bytes]:
    choose = random.Random(seed)
    fields = {
        "model": model,
        "max_tokens": options.tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    prompts = [" ".join(choose.choices(WORDS, k=options.prompt)) for _ in range(streams)]
    return [
        json.dumps(fields | {"messages": [{"role": "user", "content": prompt}]}).encode()
        for prompt in prompts
    ]


def measure(server: Server, streams: int, options: Options, seed: str) -> Round:
    before = server.family_cpu_s(without=CORE)
    flight = Flight(server.port, bodies(server.model, streams, options, seed))
    answers = [check(read(trace), options.tokens) for trace in flight.finish()]
    spent = server.family_cpu_s(without=CORE) - before
    load = load_of(answers)
    return Round(server.name, load, spent / load.tokens * 1e6)


def check(answer: Answer, tokens: int) -> Answer:
    if answer.tokens != tokens:
        raise BenchError(f"An answer has {answer.tokens} tokens instead of {tokens}.")
    return answer


def run(options: Options, rust: str | None) -> list[Round]:
    vllm_peers.make_model()
    rounds = []
    with ExitStack() as stack:
        servers = []
        for name, peer in vllm_peers.peers(rust).items():
            print(f"engines: starting {name}", flush=True)
            server = Server(name, peer.module, python=vllm_peers.python(), environ=peer.environ)
            servers.append(stack.enter_context(server))
        for streams in options.levels:
            for server in servers:
                measure(server, streams, options, "warm")
            for number in range(options.rounds):
                print(f"engines: {streams} streams, round {number + 1} of {options.rounds}", flush=True)
                # Who comes first may find the machine in another state than who comes last.
                for server in servers if number % 2 else servers[::-1]:
                    rounds.append(measure(server, streams, options, str(number)))
    return rounds


def table(rounds: Sequence[Round], where: str) -> Table:
    names = sorted({each.server for each in rounds}, key=lambda name: (name != OURS, name))
    levels = sorted({each.load.streams for each in rounds})
    rows = [_row(rounds, name, streams) for streams in levels for name in names]
    count = len(rounds) // len(rows)
    note = "`our tokens/s` and `our p99` are dragoman's figures over the peer's."
    head = ("server", "streams", "tokens/s", "first p50 ms", "first p99 ms", "frontend µs/token")
    return Table(
        "The same vLLM, with a small model, behind several servers",
        (*head, "our tokens/s", "our p99"),
        rows,
        [f"Median of {count} rounds. {where}.", note],
    )


def _row(rounds: Sequence[Round], name: str, streams: int) -> list[str]:
    def median(server: str, of: Callable[[Round], float]) -> float:
        return statistics.median(
            of(each) for each in rounds if (each.server, each.load.streams) == (server, streams)
        )

    figures = [
        f"{median(name, lambda each: each.load.tokens_per_s):,.0f}",
        f"{median(name, lambda each: each.load.first_p50_ms):.1f}",
        f"{median(name, lambda each: each.load.first_p99_ms):.1f}",
        f"{median(name, lambda each: each.frontend_us):.1f}",
    ]
    if name == OURS:
        return [name, str(streams), *figures, "", ""]
    ours = [
        ratio(median(OURS, of), median(name, of))
        for of in (lambda each: each.load.tokens_per_s, lambda each: each.load.first_p99_ms)
    ]
    return [name, str(streams), *figures, *ours]


def compared(rounds: Sequence[Round]) -> Iterator[Ratio]:
    ways: dict[tuple[int, str], list[Round]] = {}
    for each in rounds:
        ways.setdefault((each.load.streams, each.server), []).append(each)
    for (streams, server), theirs in ways.items():
        if server == OURS:
            continue
        key = f"{streams} streams, {server}"
        kinds: list[tuple[str, str, Callable[[Round], float]]] = [
            (key, "tokens/s", lambda each: each.load.tokens_per_s),
            (f"{key}, first token p99", "ms", lambda each: each.load.first_p99_ms),
            (f"{key}, frontend", "µs/token", lambda each: each.frontend_us),
        ]
        for name, unit, of in kinds:
            ours, peers = [of(each) for each in ways[streams, OURS]], [of(each) for each in theirs]
            yield Ratio(name, unit, ours, peers, less_is_better=unit != "tokens/s")


def main(options: Options, rust: str | None = None) -> None:
    where = machine.describe()
    rounds = run(options, rust)
    keep("engines", rounds, [table(rounds, where)])
    ratios.write("engines", compared(rounds))


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    parser.add_argument("--streams", metavar="N,N", help="streams at the same time [default: 1,32,128]")
    parser.add_argument("--tokens", type=int, help="tokens of an answer [default: 128]")
    parser.add_argument("--rounds", type=int, help="rounds for each server [default: 5]")
    parser.add_argument(
        "--rust", metavar="FILE", help="vLLM's frontend in Rust (vllm-rs), to be measured too"
    )
    parser.add_argument("--quick", action="store_true", help="a short run, for a first look")
    args = parser.parse_args()
    base = QUICK if args.quick else Options()
    levels = tuple(map(int, args.streams.split(","))) if args.streams else base.levels
    main(Options(levels, args.tokens or base.tokens, args.rounds or base.rounds), args.rust)


if __name__ == "__main__":
    sys.exit(told(cli))
