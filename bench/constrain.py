"""What a schema costs: tokens of a real model with and without one, and the time to make one ready.

Both run on one server and take turns round by round, each being first in every other one. A ratio is that of
the two in one round, and the median of these is told with the least and the most: medians of each alone can
come from different rounds, and on a disturbed machine they then compare nothing. Every answer is made to have
its full length: the schema is a list that goes on, the plain one ignores its end.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench import machine
from bench.answers import read
from bench.client import Flight
from bench.errors import BenchError, told
from bench.figures import load_of
from bench.peers import OURS, Setup, commands
from bench.process import Server
from bench.tables import Table, keep
from dragoman.dialects.registry import get
from dragoman.engines.local.model import Model
from dragoman.engines.local.tokenizer import LlamaTokenizer
from dragoman.engines.protocol import ModelCard
from dragoman.engines.weights import default_model
from dragoman.limits import Limits
from dragoman.turns.constrain import Constrainer
from dragoman.turns.spec import TurnSpec, Wanted
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
WAYS: dict[str, dict[str, Any]] = {"no schema": {}, "a schema": {"response_format": FORMAT}}


class Options(Struct, frozen=True):
    streams: int = 8
    tokens: int = 128
    rounds: int = 7
    compiles: int = 30


QUICK = Options(tokens=48, rounds=2, compiles=5)


class Round(Struct, frozen=True):
    tokens_per_s: float
    cpu_ms: float
    """Processor time of the server for one token."""


class Result(Struct, frozen=True, kw_only=True):
    rounds: dict[str, list[Round]]
    cold_ms: list[float]
    warm_ms: list[float]


def measure(server: Server, options: Options, way: str) -> Round:
    asked = {
        "model": server.model,
        "messages": [{"role": "user", "content": "List some people."}],
        "max_tokens": options.tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **WAYS[way],
    }
    cpu = server.cpu_s()
    answers = [
        read(trace) for trace in Flight(server.port, [json.dumps(asked).encode()] * options.streams).finish()
    ]
    cpu = server.cpu_s() - cpu
    short = [answer.tokens for answer in answers if answer.tokens != options.tokens]
    if short:
        raise BenchError(f"Answers with {way} have {short} tokens instead of {options.tokens}.")
    load = load_of(answers)
    return Round(load.tokens_per_s, cpu / load.tokens * 1000)


def compile_times(model: Path, times: int) -> tuple[list[float], list[float]]:
    """Milliseconds for a schema nobody has seen, and for the same once more."""
    tokenizer = LlamaTokenizer(Model(model))
    made = Constrainer(ModelCard(name="", max_model_len=1, constrains=True), tokenizer, Limits())
    made.vocabulary  # noqa: B018  (made once per server, not per schema)
    cold, warm = [], []
    for number in range(times):
        schema = {**PERSON, "properties": {**PERSON["properties"], f"field_{number}": {"type": "boolean"}}}
        wanted = Wanted(syntax="json_schema", value=schema, param="response_format")
        spec = TurnSpec(
            model=None, prompts=(IdsPrompt((1,)),), sampling=Sampling(max_tokens=1), wanted=wanted
        )
        cold.append(_ms(partial(made.constraint, spec, get("plain"), in_reasoning=False)))
        warm.append(_ms(partial(made.constraint, spec, get("plain"), in_reasoning=False)))
    return cold, warm


def _ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def run(setup: Setup, options: Options) -> Result:
    rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
    with Server(OURS, commands(setup)[OURS]) as server:
        for way in WAYS:
            measure(server, options, way)  # warms up
        for number in range(options.rounds):
            print(f"constrain: round {number + 1} of {options.rounds}", flush=True)
            for way in list(WAYS)[:: -1 if number % 2 else 1]:
                rounds[way].append(measure(server, options, way))
    cold, warm = compile_times(setup.model, options.compiles)
    return Result(rounds=rounds, cold_ms=cold, warm_ms=warm)


def paired(values: Sequence[float], plain: Sequence[float]) -> str:
    """`0.98x (0.95 to 1.01)`: the ratio within each round, its median and its range."""
    ratios = [one / other for one, other in zip(values, plain, strict=True)]
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def tables(result: Result, options: Options, where: str) -> Sequence[Table]:
    rates = {way: [one.tokens_per_s for one in done] for way, done in result.rounds.items()}
    costs = {way: [one.cpu_ms for one in done] for way, done in result.rounds.items()}
    plain = next(iter(WAYS))
    rows = [
        (
            way,
            f"{statistics.median(rates[way]):.1f}",
            paired(rates[way], rates[plain]),
            f"{statistics.median(costs[way]):.2f}",
            paired(costs[way], costs[plain]),
        )
        for way in WAYS
    ]
    times = [
        (name, f"{statistics.median(found):.2f}", f"{max(found):.2f}")
        for name, found in (("not seen before", result.cold_ms), ("seen before", result.warm_ms))
    ]
    note = f"Medians of {options.rounds} rounds, {options.streams} streams. {where}."
    return [
        Table("What a schema costs", ("answers", "tokens/s", "rate", "CPU ms/token", "CPU"), rows, [note]),
        Table("An ordinary schema made ready", ("schema", "median ms", "most ms"), times, [where + "."]),
    ]


def main(setup: Setup, options: Options) -> None:
    where = machine.describe()
    result = run(setup, options)
    keep("constrain", result, tables(result, options, where))


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.constrain", description=__doc__)
    parser.add_argument("--model", metavar="FILE", help="a GGUF file [default: the default weights]")
    parser.add_argument("--streams", type=int, help="streams at the same time [default: 8]")
    parser.add_argument("--tokens", type=int, help="tokens of an answer [default: 128]")
    parser.add_argument("--rounds", type=int, help="rounds [default: 7]")
    parser.add_argument("--quick", action="store_true", help="a short run, for a first look")
    args = parser.parse_args()
    base = QUICK if args.quick else Options()
    options = Options(
        args.streams or base.streams, args.tokens or base.tokens, args.rounds or base.rounds, base.compiles
    )
    main(Setup(Path(args.model) if args.model else default_model()), options)


if __name__ == "__main__":
    sys.exit(told(cli))
