"""The price of a token on its way to the socket: dragoman beside FastAPI with pydantic, without a model.

Each server runs on one core and the client on another. One token per stream and step is made by the same few
lines in all of them; what is measured is everything between that and the client. Only the time in which
tokens flow counts, tokens are counted by the servers, and every answer is compared with what was said.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from msgspec import Struct

from bench import machine, plots, ratios, words
from bench.answers import Answer, read
from bench.client import Flight
from bench.errors import BenchError, told
from bench.process import Server
from bench.ratios import Ratio
from bench.tables import Table, keep, ratio

SERVERS = {
    "dragoman": ["bench.servers.scripted"],
    "dragoman, --write-interval 0.01": ["bench.servers.scripted", "--write-interval", "0.01"],
    "FastAPI + pydantic, plain models": ["bench.servers.pydantic_way", "--models", "plain"],
    "FastAPI + pydantic, as vLLM declares them": ["bench.servers.pydantic_way", "--models", "vllm"],
    "bare ASGI, bytes made beforehand": ["bench.servers.bare"],
}
OURS = "dragoman"
NOTE = "`our tokens/s` is dragoman's rate over the peer's; `its CPU` is the peer's time over dragoman's."


class Round(Struct, frozen=True):
    tokens: int
    """As the server counts them."""
    events: int
    """Those that had text."""
    seconds: float
    cpu_us: float
    """Processor time of the server for one token, in microseconds."""
    client_share: float
    """How much of the time the client was busy; near 1 it, and not the server, sets the pace."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Result(Struct, frozen=True, kw_only=True):
    server: str
    streams: int
    tokens_per_s: float
    cpu_us: float
    client_share: float
    events: float
    """For one token."""
    rounds: list[Round]


class Options(Struct, frozen=True):
    levels: Sequence[int] = (1, 8, 64)
    tokens: int = 512
    """Of an answer; more where the streams of a round have fewer than `least` together."""
    rounds: int = 7
    least: int = 4096

    def length(self, streams: int) -> int:
        """Tokens of an answer at one number of streams: a round of a few milliseconds says nothing."""
        return max(self.tokens, self.least // streams)


QUICK = Options(levels=(1, 64), tokens=256, rounds=3)


def body(tokens: int) -> bytes:
    asked = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "What is the answer?"}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(asked).encode()


def measure(server: Server, streams: int, tokens: int) -> Round:
    """One round: all streams open, then all tokens flow."""
    flight = Flight(server.port, [body(tokens)] * streams)
    flight.open()
    opened, server_cpu, own_cpu = time.perf_counter(), server.cpu_s(), time.process_time()
    traces = flight.finish()
    server_cpu, own_cpu = server.cpu_s() - server_cpu, time.process_time() - own_cpu
    answers = [check(read(trace), tokens) for trace in traces]
    seconds, count = flow_s(answers, opened), sum(answer.tokens for answer in answers)
    events = sum(len(answer.times) for answer in answers)
    return Round(count, events, seconds, server_cpu / count * 1e6, own_cpu / seconds)


def flow_s(answers: Sequence[Answer], opened: float) -> float:
    """Seconds from the first token after this moment to the last."""
    times = [moment for answer in answers for moment in answer.times if moment > opened]
    if not times or max(times) == min(times):
        raise BenchError("Tokens flowed before the clock was read, or all at once: the machine is too busy.")
    return max(times) - min(times)


def check(answer: Answer, tokens: int) -> Answer:
    if answer.text != words.text(tokens) or answer.tokens != tokens:
        raise BenchError(f"An answer of {answer.tokens} tokens is not what was said ({tokens} tokens).")
    return answer


def run(options: Options) -> list[Result]:
    cores = machine.cores()
    if len(cores) < 2:
        print("stream: only one core, so the client takes time from the servers", flush=True)
    os.sched_setaffinity(0, {cores[-1]})
    try:
        return [result for streams in options.levels for result in _level(streams, options, cores[0])]
    finally:
        os.sched_setaffinity(0, cores)


def _level(streams: int, options: Options, core: int) -> list[Result]:
    """All servers at one number of streams. Rounds take turns, so that noise hits all alike."""
    tokens = options.length(streams)
    flags = ["--streams", str(streams), "--tokens", str(tokens)]
    rounds: dict[str, list[Round]] = {name: [] for name in SERVERS}
    with ExitStack() as stack:
        started = [
            stack.enter_context(Server(name, [*module, *flags], core=core))
            for name, module in SERVERS.items()
        ]
        for server in started:
            measure(server, streams, tokens)  # warms up
        for number in range(options.rounds):
            print(f"stream: {streams} streams, round {number + 1} of {options.rounds}", flush=True)
            for server in started:
                rounds[server.name].append(measure(server, streams, tokens))
    return [_result(name, streams, done) for name, done in rounds.items()]


def _result(name: str, streams: int, rounds: list[Round]) -> Result:
    return Result(
        server=name,
        streams=streams,
        tokens_per_s=statistics.median(each.tokens_per_s for each in rounds),
        cpu_us=statistics.median(each.cpu_us for each in rounds),
        client_share=statistics.median(each.client_share for each in rounds),
        events=statistics.median(each.events / each.tokens for each in rounds),
        rounds=rounds,
    )


def table(results: list[Result], where: str) -> Table:
    ours = {result.streams: result for result in results if result.server == OURS}
    rows = [
        (
            result.server,
            str(result.streams),
            f"{result.tokens_per_s:,.0f}",
            f"{result.cpu_us:.1f}",
            "" if result.server == OURS else ratio(ours[result.streams].tokens_per_s, result.tokens_per_s),
            "" if result.server == OURS else ratio(result.cpu_us, ours[result.streams].cpu_us),
            f"{result.client_share:.0%}",
            f"{result.events:.2f}",
        )
        for result in results
    ]
    return Table(
        "The price of a token on its way to the socket",
        (
            "server",
            "streams",
            "tokens/s",
            "CPU µs/token",
            "our tokens/s",
            "its CPU",
            "client busy",
            "events/token",
        ),
        rows,
        [f"Median of {len(results[0].rounds)} rounds. {where}.", NOTE],
    )


def compared(results: Sequence[Result]) -> Iterator[Ratio]:
    ours = {result.streams: result.rounds for result in results if result.server == OURS}
    for result in results:
        if result.server != OURS:
            key, mine = f"{result.streams} streams, {result.server}", ours[result.streams]
            yield Ratio(key, "tokens/s", *_columns(mine, result.rounds, lambda one: one.tokens_per_s))
            costs = _columns(mine, result.rounds, lambda one: one.cpu_us)
            yield Ratio(f"{key}, CPU", "µs/token", *costs, less_is_better=True)


def _columns(
    ours: Sequence[Round], theirs: Sequence[Round], of: Callable[[Round], float]
) -> tuple[list[float], list[float]]:
    return [of(one) for one in ours], [of(one) for one in theirs]


def main(options: Options, plot_folder: str | None) -> None:
    where = machine.describe()
    results = run(options)
    keep("stream", results, [table(results, where)])
    ratios.write("stream", compared(results))
    plots.stream([(each.server, each.streams, each.cpu_us) for each in results], plot_folder)


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.stream", description=__doc__)
    parser.add_argument("--streams", metavar="N,N", help="streams at the same time [default: 1,8,64]")
    parser.add_argument("--tokens", type=int, help="tokens of an answer [default: 512]")
    parser.add_argument("--rounds", type=int, help="rounds for each server [default: 7]")
    parser.add_argument("--quick", action="store_true", help="a short run, for a first look")
    parser.add_argument("--plots", metavar="DIR", help="folder for the plots [default: bench/out]")
    args = parser.parse_args()
    base = QUICK if args.quick else Options()
    levels = tuple(map(int, args.streams.split(","))) if args.streams else base.levels
    main(Options(levels, args.tokens or base.tokens, args.rounds or base.rounds), args.plots)


if __name__ == "__main__":
    sys.exit(told(cli))
