"""Whether a server stays as fast when more is asked of it: long contexts, and a long line of requests.

All servers run all the time and take turns round by round. Contexts are known before they are timed, and only
the time counts in which all streams are under way, so that reading them is no part of it. A line is timed
from the first request to the last token.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from bench import flags, machine, ratios, serve
from bench.errors import BenchError, told
from bench.figures import load_of
from bench.pairs import beside, paired, turns
from bench.peers import EXACT, OURS, Setup, commands
from bench.process import Server, running
from bench.ratios import Ratio
from bench.tables import Table, keep

ROOM = 64
"""Tokens around the words of a prompt, at most."""


class Options(Struct, frozen=True):
    streams: int = 8
    short: int = 24
    """Words of a short context."""
    long: int = 2000
    """Words of a long one."""
    tokens: int = 128
    """Of an answer after a context."""
    at_once: int = 32
    """Slots, and requests where nobody waits."""
    waves: int = 8
    """How often so many come, each time after the last of them is served."""
    line: int = 1000
    """Requests that come together."""
    line_tokens: int = 16
    """Of an answer to one of them."""
    rounds: int = 3


QUICK = Options(long=500, tokens=32, waves=2, line=128, rounds=1)


class Round(Struct, frozen=True):
    server: str
    case: int
    """Words of the context, or requests at once."""
    tokens_per_s: float


class Result(Struct, frozen=True):
    contexts: list[Round]
    lines: list[Round]


class Contexts:
    """Streams with contexts that the server knows."""

    def __init__(self, server: Server, options: Options) -> None:
        self._asker = serve.Asker(server, serve.Options(), "contexts")
        self._tokens = options.tokens
        sizes = (options.short, options.long)
        self._prompts = {size: [self._asker.words(size) for _ in range(options.streams)] for size in sizes}
        for prompts in self._prompts.values():
            self._asker.answers(prompts, 4)

    def rate(self, size: int) -> float:
        load = load_of(self._asker.answers(self._prompts[size], self._tokens))
        if not load.steady_per_s:
            raise BenchError(f"The streams with contexts of {size} words were never all under way.")
        return load.steady_per_s


class Line:
    """Short requests that all come together."""

    def __init__(self, server: Server, options: Options) -> None:
        self._asker = serve.Asker(server, serve.Options(prompt=8), "line")
        self._tokens = options.line_tokens
        self._times = {options.at_once: options.waves, options.line: 1}
        self.rate(options.at_once)  # warms up

    def rate(self, requests: int) -> float:
        times = range(self._times[requests])
        return statistics.median(load_of(self._asker.ask(requests, self._tokens)).tokens_per_s for _ in times)


def measure(
    servers: Mapping[str, Sequence[str]],
    prepare: Callable[[Server], Contexts | Line],
    cases: Sequence[int],
    rounds: int,
) -> list[Round]:
    result = []
    with running(servers) as started:
        prepared = {server.name: prepare(server) for server in started}
        for number in range(rounds):
            for name, asked in prepared.items():
                for case in turns(cases, number):
                    rate = asked.rate(case)
                    result.append(Round(name, case, rate))
                    print(f"flat: round {number + 1} of {rounds}, {name}, {case}: {rate:.0f}", flush=True)
    return result


def run(model: Path, threads: int, options: Options, only: Sequence[str] = ()) -> Result:
    # Short and long contexts stay side by side in slots of their own.
    context = options.long + options.tokens + ROOM
    wide = Setup(model, slots=2 * options.streams, context=context, threads=threads)
    many = Setup(model, slots=options.at_once, threads=threads)
    names = only or EXACT
    cases = (options.short, options.long), (options.at_once, options.line)
    return Result(
        measure(commands(wide, names), partial(Contexts, options=options), cases[0], options.rounds),
        measure(commands(many, names), partial(Line, options=options), cases[1], options.rounds),
    )


def tables(result: Result, options: Options, where: str) -> list[Table]:
    note = f"Median of {options.rounds} rounds. {where}."
    ours = "`kept` is the second rate over the first; `our tokens/s` is our second rate over the peer's."
    contexts = f"{options.streams} streams, steady, contexts of so many words. {note}"
    lines = f"{options.at_once} slots, {options.line_tokens} tokens each, so many requests at once. {note}"
    return [
        _table("Long contexts", result.contexts, (options.short, options.long), [contexts, ours]),
        _table("A long line", result.lines, (options.at_once, options.line), [lines, ours]),
    ]


def _table(title: str, rounds: Sequence[Round], cases: tuple[int, int], notes: Sequence[str]) -> Table:
    def rates(server: str, case: int) -> list[float]:
        return [each.tokens_per_s for each in rounds if (each.server, each.case) == (server, case)]

    rows = []
    for server in dict.fromkeys(each.server for each in rounds):
        plain, more = (rates(server, case) for case in cases)
        figures = [f"{statistics.median(plain):,.0f}", f"{statistics.median(more):,.0f}", paired(more, plain)]
        rows.append([server, *figures, "" if server == OURS else beside(rates(OURS, cases[1]), more)])
    head = ("server", *(f"{case:,}: tokens/s" for case in cases), "kept", "our tokens/s")
    return Table(title, head, rows, notes)


def compared(result: Result, options: Options) -> Iterator[Ratio]:
    cases = (
        ("long contexts", result.contexts, options.short, options.long),
        ("a long line", result.lines, options.at_once, options.line),
    )
    for name, rounds, few, many in cases:
        rates: dict[tuple[str, int], list[float]] = {}
        for each in rounds:
            rates.setdefault((each.server, each.case), []).append(each.tokens_per_s)
        for server in dict.fromkeys(each.server for each in rounds):
            yield Ratio(f"{name}, kept by {server}", "tokens/s", rates[server, many], rates[server, few])
            if server != OURS and (OURS, many) in rates:
                yield Ratio(f"{name}, {server}", "tokens/s", rates[OURS, many], rates[server, many])


def main(model: Path, threads: int, options: Options, only: Sequence[str] = ()) -> None:
    where = machine.describe()
    result = run(model, threads, options, only)
    keep("flat", result, tables(result, options, f"{model.name}. {where}"))
    ratios.write("flat", compared(result, options))


def cli() -> None:
    parser = flags.parser("flat", __doc__, Options().rounds)
    parser.add_argument("--long", type=int, help="words of a long context [default: 2000]")
    parser.add_argument("--line", type=int, help="requests that come together [default: 1000]")
    args, options = flags.read(parser, Options(), QUICK)
    main(args.model, args.threads, options, args.only)


if __name__ == "__main__":
    sys.exit(told(cli))
