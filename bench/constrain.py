"""What a schema costs: tokens of a real model with and without one, and the time to make one ready.

All servers run all the time and take turns round by round, and so do both ways to ask. Every answer is made
to have its full length: the schema is a list that goes on, the plain one ignores its end. The price is the
rate with a schema over that without, of one server; llama.cpp's has grammars of its own.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench import flags, machine, ratios, serve
from bench.errors import told
from bench.figures import load_of
from bench.pairs import beside, paired, turns
from bench.peers import EXACT, OURS, Setup, commands
from bench.process import Server, running
from bench.ratios import Ratio
from bench.tables import Table, keep
from dragoman.dialects.registry import get_dialect
from dragoman.engines.local.gguf_model import LlamaModel, LlamaTokenizer
from dragoman.engines.protocol import ModelCard
from dragoman.limits import Limits
from dragoman.turns.constraints import ConstraintBuilder
from dragoman.turns.spec import OutputConstraint, TurnSpec
from dragoman.types import IdsPrompt, Sampling

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "role": {"enum": ["reader", "writer", "owner"]},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    },
    "required": ["name", "age", "email", "role", "address", "tags"],
    "additionalProperties": False,
}
"""An ordinary schema."""
PEOPLE: dict[str, Any] = {"type": "array", "items": PERSON, "minItems": 100}
"""More than any answer holds here."""
FORMAT = {"type": "json_schema", "json_schema": {"name": "people", "schema": PEOPLE}}
PLAIN = "no schema"
WAYS: dict[str, dict[str, Any]] = {PLAIN: {}, "a schema": {"response_format": FORMAT}}


class Options(Struct, frozen=True):
    streams: int = 8
    tokens: int = 128
    rounds: int = 7
    compiles: int = 30
    temperature: float = 1.0


QUICK = Options(tokens=48, rounds=2, compiles=5)


class Round(Struct, frozen=True):
    server: str
    way: str
    tokens_per_s: float
    cpu_ms: float
    """Processor time of the server for one token."""


class Result(Struct, frozen=True, kw_only=True):
    rounds: list[Round]
    cold_ms: list[float]
    warm_ms: list[float]


def measure(server: Server, options: Options, way: str, number: int) -> Round:
    asked = serve.Options(task="List people with:", prompt=4, temperature=options.temperature)
    asker = serve.Asker(server, asked, f"round {number}", WAYS[way])
    cpu = server.cpu_s()
    load = load_of(asker.ask(options.streams, options.tokens))
    return Round(server.name, way, load.tokens_per_s, (server.cpu_s() - cpu) / load.tokens * 1000)


def compile_times(model: Path, times: int) -> tuple[list[float], list[float]]:
    """Milliseconds for a schema nobody has seen, and for the same once more."""
    tokenizer = LlamaTokenizer(LlamaModel(model))
    builder = ConstraintBuilder(ModelCard(name="", max_model_len=1, constrains=True), tokenizer, Limits())
    builder.vocabulary  # noqa: B018  (made once per server, not per schema)
    cold, warm = [], []
    for number in range(times):
        schema = {**PERSON, "properties": {**PERSON["properties"], f"field_{number}": {"type": "boolean"}}}
        wanted = OutputConstraint(syntax="json_schema", value=schema, param="response_format")
        spec = TurnSpec(
            model=None, prompts=(IdsPrompt((1,)),), sampling=Sampling(max_tokens=1), output_constraint=wanted
        )
        cold.append(_ms(partial(builder.constraint, spec, get_dialect("plain"), in_reasoning=False)))
        warm.append(_ms(partial(builder.constraint, spec, get_dialect("plain"), in_reasoning=False)))
    return cold, warm


def _ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def run(setup: Setup, options: Options, only: Sequence[str] = ()) -> Result:
    rounds = []
    with running(commands(setup, only or EXACT)) as servers:
        for server in servers:
            for way in WAYS:
                measure(server, options, way, -1)  # warms up
        for number in range(options.rounds):
            print(f"constrain: round {number + 1} of {options.rounds}", flush=True)
            for server in servers:
                rounds += [measure(server, options, way, number) for way in turns(list(WAYS), number)]
    cold, warm = compile_times(setup.model, options.compiles)
    return Result(rounds=rounds, cold_ms=cold, warm_ms=warm)


def tables(result: Result, options: Options, where: str) -> Sequence[Table]:
    servers = dict.fromkeys(each.server for each in result.rounds)
    rows = [_row(result.rounds, server, way) for server in servers for way in WAYS]
    times = [
        (name, f"{statistics.median(values):.2f}", f"{max(values):.2f}")
        for name, values in (("not seen before", result.cold_ms), ("seen before", result.warm_ms))
    ]
    head = ("server", "answers", "tokens/s", "rate", "CPU ms/token", "CPU", "our tokens/s")
    asked = f"{options.streams} streams, temperature {options.temperature:g}"
    note = f"Medians of {options.rounds} rounds, {asked}. {where}."
    notes = [note, "`our tokens/s` is dragoman's rate over the peer's."]
    return [
        Table("What a schema costs", head, rows, notes),
        Table("An ordinary schema made ready", ("schema", "median ms", "most ms"), times, [where + "."]),
    ]


def _row(rounds: Sequence[Round], server: str, way: str) -> list[str]:
    def rates(server: str, way: str) -> list[float]:
        return [each.tokens_per_s for each in rounds if (each.server, each.way) == (server, way)]

    def costs(way: str) -> list[float]:
        return [each.cpu_ms for each in rounds if (each.server, each.way) == (server, way)]

    figures = [
        f"{statistics.median(rates(server, way)):.1f}",
        paired(rates(server, way), rates(server, PLAIN)),
        f"{statistics.median(costs(way)):.2f}",
        paired(costs(way), costs(PLAIN)),
    ]
    return [server, way, *figures, "" if server == OURS else beside(rates(OURS, way), rates(server, way))]


def compared(rounds: Sequence[Round]) -> Iterator[Ratio]:
    """What a schema leaves of each server's rate, and ours beside the peers'."""
    rates: dict[tuple[str, str], list[float]] = {}
    for each in rounds:
        rates.setdefault((each.server, each.way), []).append(each.tokens_per_s)
    for server, way in rates:
        if way != PLAIN:
            yield Ratio(f"kept by {server}", "tokens/s", rates[server, way], rates[server, PLAIN])
            if server != OURS and (OURS, way) in rates:
                yield Ratio(f"{way}, {server}", "tokens/s", rates[OURS, way], rates[server, way])


def main(setup: Setup, options: Options, only: Sequence[str] = ()) -> None:
    where = machine.describe()
    result = run(setup, options, only)
    keep("constrain", result, tables(result, options, where))
    ratios.write("constrain", compared(result.rounds))


def cli() -> None:
    parser = flags.parser("constrain", __doc__, Options().rounds)
    parser.add_argument("--streams", type=int, help="streams at the same time [default: 8]")
    parser.add_argument("--tokens", type=int, help="tokens of an answer [default: 128]")
    parser.add_argument("--temperature", type=float, help="of the sampling [default: 1]")
    args, options = flags.read(parser, Options(), QUICK)
    main(Setup(args.model, threads=args.threads), options, args.only)


if __name__ == "__main__":
    sys.exit(told(cli))
