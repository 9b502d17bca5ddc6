"""A real model behind dragoman and behind llama.cpp's own server: the same file, threads and memory.

Servers run one at a time and take turns round by round, so that noise hits all alike. Each stream asks one
thing after another, and every answer is made to have its full length. The first token is also timed on a long
prefix: fresh, known, and known to many at once.
"""

import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from bench import flags, machine, peers, plots, ratios, serve_tables
from bench.answers import Answer, read
from bench.client import Flight
from bench.errors import BenchError, told
from bench.figures import First, Load, Visit, load_of
from bench.peers import Setup
from bench.process import Server
from bench.tables import keep

# Short words of everyday English are one token each in nearly every vocabulary.
WORDS = ("time", "year", "way", "day", "man", "life", "child", "world", "school", "state", "hand", "place")

LIMIT_S = 300.0
"""For all answers together; where more are asked for at once than that, a second for each."""


class Options(Struct, frozen=True):
    levels: Sequence[int] = (1, 8, 32)
    tokens: int = 128
    rounds: int = 3
    least: int = 8
    """Answers at each level; where they are fewer, two for each stream."""
    temperature: float = 0.0
    task: str = "Tell a story with:"
    """How a prompt begins."""
    prompt: int = 24
    """Words of a prompt."""
    prefix: int = 500
    """Words that prompts share where the first token is timed."""
    many: int = 8
    """Streams that ask with a known prefix at once."""


QUICK = Options(tokens=64, rounds=1, least=4)


class Asker:
    """Sends rounds of requests to one server. Prompts differ, unless a prefix is shared."""

    def __init__(
        self, server: Server, options: Options, seed: str, fields: Mapping[str, Any] | None = None
    ) -> None:
        """With further fields of the requests, if there are any."""
        self._server = server
        self._options = options
        self._random = random.Random(seed)
        self._fields = fields or {}

    def words(self, count: int) -> list[str]:
        return self._random.choices(WORDS, k=count)

    def ask(
        self, count: int, tokens: int, prefix: Sequence[str] = (), streams: int | None = None
    ) -> list[Answer]:
        prompts = [[*prefix, *self.words(self._options.prompt)] for _ in range(count)]
        return self.answers(prompts, tokens, streams)

    def answers(
        self, prompts: Sequence[Iterable[str]], tokens: int, streams: int | None = None
    ) -> list[Answer]:
        """All at once, or by so many streams; every answer has the length that was asked for."""
        bodies = [self._body(prompt, tokens) for prompt in prompts]
        flight = Flight(self._server.port, bodies, limit_s=max(LIMIT_S, len(bodies)), at_once=streams)
        answers = [read(trace, tokens) for trace in flight.finish()]
        short = [answer.tokens for answer in answers if answer.tokens != tokens]
        if short and self._server.name in peers.EXACT | {peers.OURS_OPENVINO}:
            raise BenchError(f"{self._server.name} gave answers of {short} tokens instead of {tokens}.")
        return answers

    def _body(self, prompt: Iterable[str], tokens: int) -> bytes:
        asked = {
            "model": self._server.model,
            "messages": [{"role": "user", "content": " ".join([self._options.task, *prompt])}],
            "max_tokens": tokens,
            "temperature": self._options.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        return json.dumps(asked).encode()


def visit(server: Server, options: Options, number: int) -> Visit:
    """Everything that is measured of one server in one round."""
    asker = Asker(server, options, f"round {number}")
    asker.ask(1, 4)  # warms up
    loads = [_load(asker, streams, options) for streams in options.levels]
    firsts = _first_tokens(asker, options)
    return Visit(server.name, loads, firsts, server.peak_mib(), server.start_s)


def _load(asker: Asker, streams: int, options: Options) -> Load:
    # Several for each stream: how fast an answer comes depends on what it says.
    count = max(options.least, 2 * streams)
    load = load_of(asker.ask(count, options.tokens, streams=streams), streams)
    print(f"serve:   {streams} streams: {load.tokens_per_s:.0f} tokens/s", flush=True)
    return load


def _first_tokens(asker: Asker, options: Options) -> list[First]:
    """The first asks with a prefix nobody has seen, the second knows it, then many come with it at once."""
    prefix = asker.words(options.prefix)
    cases = [
        ("fresh prefix", 1),
        ("known prefix", 1),
        (f"known prefix, {options.many} streams", options.many),
    ]
    firsts = [First.of(case, asker.ask(streams, 4, prefix)) for case, streams in cases]
    for first in firsts:
        print(f"serve:   first token, {first.case}: {first.p50_ms:.0f} ms", flush=True)
    return firsts


def run(setup: Setup, options: Options, only: Sequence[str] = ()) -> list[Visit]:
    chosen = peers.commands(setup, only)
    visits = []
    for number in range(options.rounds):
        for name, command in chosen.items():
            print(f"serve: round {number + 1} of {options.rounds}, {name}", flush=True)
            with Server(name, command) as server:
                visits.append(visit(server, options, number))
    return visits


def main(setup: Setup, options: Options, plot_folder: str | None, only: Sequence[str] = ()) -> None:
    where = machine.describe()
    visits = run(setup, options, only)
    tables = serve_tables.tables(visits, f"Median of {options.rounds} rounds. {setup.model.name}. {where}.")
    keep("serve", visits, tables)
    ratios.write("serve", serve_tables.compared(visits))
    plots.serve(serve_tables.load_bars(visits), plot_folder)
    plots.first_token(serve_tables.first_bars(visits), plot_folder)


def cli() -> None:
    parser = flags.parser("serve", __doc__, Options().rounds)
    parser.add_argument(
        "--streams", dest="levels", type=_levels, metavar="N,N", help="at the same time [default: 1,8,32]"
    )
    parser.add_argument("--tokens", type=int, help="tokens of an answer [default: 128]")
    parser.add_argument("--prompt", type=int, help="words of a prompt [default: 24]")
    parser.add_argument("--context", type=int, default=768, help="tokens of a sequence [default: 768]")
    parser.add_argument("--readers", type=int, help="those that dragoman decides for [default: 32]")
    parser.add_argument("--temperature", type=float, help="of the sampling [default: 0, greedy]")
    parser.add_argument("--plots", metavar="DIR", help="folder for the plots [default: bench/out]")
    args, options = flags.read(parser, Options(), QUICK)
    setup = Setup(args.model, context=args.context, threads=args.threads, readers=args.readers)
    main(setup, options, args.plots, args.only)


def _levels(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(told(cli))
