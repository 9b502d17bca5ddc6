"""One reader, as who runs a model for himself: dragoman and llama.cpp's own server, both with one slot.

Both run all the time, and are asked the same in turns, so that what the machine does meanwhile hits both: the
ratio is that of two answers that were written one after the other.

What `auto` takes shows beside both runners: `--only dragoman --only "dragoman, runner llamacpp" --only
"dragoman, runner openvino" --only "llama.cpp server"`.
"""

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from bench import flags, machine, peers, ratios
from bench.errors import told
from bench.figures import load_of
from bench.pairs import paired, turns
from bench.peers import LLAMA_CPP, OURS, Setup
from bench.process import Server, running
from bench.ratios import Ratio
from bench.serve import Asker
from bench.serve import Options as Asked
from bench.tables import Table, keep


class Options(Struct, frozen=True):
    rounds: int = 10
    tokens: int = 64
    prompt: int = 24
    """Words of a prompt."""
    temperature: float = 1.0
    """Where answers repeat nothing, nobody gains by guesses."""


QUICK = Options(rounds=3, tokens=32)


class Round(Struct, frozen=True):
    server: str
    tokens_per_s: float
    first_ms: float


def measure(server: Server, options: Options, number: int) -> Round:
    asked = Asked(tokens=options.tokens, temperature=options.temperature, prompt=options.prompt)
    load = load_of(Asker(server, asked, f"round {number}").ask(1, options.tokens))
    return Round(server.name, load.tokens_per_s, load.first_p50_ms)


def run(setup: Setup, options: Options, only: Sequence[str]) -> tuple[list[Round], dict[str, float]]:
    """The rounds, and the most memory of each server in MiB."""
    rounds = []
    with running(peers.commands(setup, only)) as servers:
        for server in servers:
            # The same as the first round: afterwards nothing is new to it but the words.
            measure(server, options, -1)
        for number in range(options.rounds):
            for server in turns(servers, number):
                result = measure(server, options, number)
                rate = f"{result.tokens_per_s:.1f}"
                print(f"alone: {number + 1} of {options.rounds}, {server.name}: {rate}", flush=True)
                rounds.append(result)
        return rounds, {server.name: server.peak_mib() for server in servers}


def table(rounds: Sequence[Round], memory: dict[str, float], where: str) -> Table:
    def rates(name: str) -> list[float]:
        return [each.tokens_per_s for each in rounds if each.server == name]

    rows = []
    for name in memory:
        first = statistics.median(each.first_ms for each in rounds if each.server == name)
        figures = [f"{statistics.median(rates(name)):.1f}", f"{first:.0f}", f"{memory[name]:,.0f}"]
        rows.append([name, *figures, "" if name == OURS else paired(rates(OURS), rates(name))])
    head = ("server", "tokens/s", "first token ms", "peak MiB", "our tokens/s")
    return Table("One reader", head, rows, [f"Median of {len(rates(OURS))} answers in turns. {where}."])


def compared(rounds: Sequence[Round], memory: Mapping[str, float]) -> Iterator[Ratio]:
    def rates(name: str) -> list[float]:
        return [each.tokens_per_s for each in rounds if each.server == name]

    for name in memory if OURS in memory else ():
        if name != OURS:
            yield Ratio(name, "tokens/s", rates(OURS), rates(name))
            yield Ratio(f"peak memory, {name}", "MiB", [memory[OURS]], [memory[name]], less_is_better=True)


def cli() -> None:
    parser = flags.parser("alone", __doc__, Options().rounds)
    parser.add_argument("--tokens", type=int, help=f"tokens of an answer [default: {Options().tokens}]")
    parser.add_argument("--prompt", type=int, help=f"words of a prompt [default: {Options().prompt}]")
    parser.add_argument("--temperature", type=float, help="of the sampling [default: 1]")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a sequence [default: 4096]")
    args, options = flags.read(parser, Options(), QUICK)
    setup = Setup(args.model, slots=1, context=args.context, threads=args.threads)
    rounds, memory = run(setup, options, args.only or (OURS, LLAMA_CPP))
    where = f"{setup.model.name}. {machine.describe()}"
    keep("alone", rounds, [table(rounds, memory, where)])
    ratios.write("alone", compared(rounds, memory))


if __name__ == "__main__":
    sys.exit(told(cli))
