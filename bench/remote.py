"""What a server in front of others costs: the same streams directly, and through `--engine remote`.

Two servers without a model, a token for every stream each 20 ms, and one in front of them. Told are the
processor time of the server that the client speaks to and that of all, for one token, while tokens flow; and
how long the first token takes. Rounds take turns, so that noise hits all alike.
"""

import argparse
import statistics
import sys
from contextlib import ExitStack

from msgspec import Struct

from bench import machine, stream
from bench.answers import read
from bench.client import Flight
from bench.errors import told
from bench.process import Server
from bench.tables import Table, keep

MODULE = "bench.servers.upstreams"
UPSTREAMS = 2


class Options(Struct, frozen=True):
    levels: tuple[int, ...] = (8, 32)
    tokens: int = 256
    rounds: int = 5


QUICK = Options(tokens=96, rounds=3)


class Round(Struct, frozen=True):
    first_ms: float
    """The median of all streams."""
    cpu_us: float
    all_cpu_us: float


class Result(Struct, frozen=True):
    way: str
    streams: int
    rounds: list[Round]

    def median(self, field: str) -> float:
        return float(statistics.median(getattr(each, field) for each in self.rounds))


def measure(front: Server, others: list[Server], streams: int, tokens: int) -> Round:
    flight = Flight(front.port, [stream.body(tokens)] * streams)
    flight.open()
    before = [server.cpu_s() for server in (front, *others)]
    answers = [stream.check(read(trace), tokens) for trace in flight.finish()]
    spent = [server.cpu_s() - cpu for server, cpu in zip((front, *others), before, strict=True)]
    each = streams * tokens / 1e6
    first = statistics.median(answer.ttft_s for answer in answers)
    return Round(first * 1e3, spent[0] / each, sum(spent) / each)


def run(options: Options) -> list[Result]:
    flags = ["--tokens", str(options.tokens)]
    with ExitStack() as stack:
        upstreams = [
            stack.enter_context(Server(f"upstream-{number}", [MODULE, *flags])) for number in range(UPSTREAMS)
        ]
        named = [flag for each in upstreams for flag in ("--upstream", f"http://127.0.0.1:{each.port}")]
        front = stack.enter_context(Server("front", [MODULE, *flags, *named]))
        ways: dict[str, tuple[Server, list[Server]]] = {
            "direct": (upstreams[0], []),
            "through --engine remote": (front, upstreams),
        }
        results = [Result(way, level, []) for level in options.levels for way in ways]
        for result in results:
            measure(*ways[result.way], result.streams, options.tokens)  # warms up
        for number in range(options.rounds):
            print(f"remote: round {number + 1} of {options.rounds}", flush=True)
            for result in results:
                result.rounds.append(measure(*ways[result.way], result.streams, options.tokens))
    return results


def table(results: list[Result]) -> Table:
    rows = [
        (
            result.way,
            str(result.streams),
            f"{result.median('cpu_us'):.1f}",
            f"{result.median('all_cpu_us'):.1f}",
            f"{result.median('first_ms'):.0f}",
        )
        for result in results
    ]
    return Table(
        "A server in front of two others, scripted engines, 20 ms a step",
        ("way", "streams", "CPU µs/token", "of all processes", "first token, ms"),
        rows,
        [f"Medians of {len(results[0].rounds)} rounds. {machine.describe()}."],
    )


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.remote", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run, for a first look")
    args = parser.parse_args()
    results = run(QUICK if args.quick else Options())
    keep("remote", results, [table(results)])


if __name__ == "__main__":
    sys.exit(told(cli))
