"""What it costs to keep keys and values so that answers do not depend on what else is computed.

llama.cpp by itself, without HTTP and scheduler: its own way; as dragoman computes for one reader; as for
several; and as for several with `--deterministic`. All have the same weights, and are measured in turns.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from msgspec import Struct

from bench import machine
from bench.errors import told
from bench.pairs import turns
from bench.tables import Table, keep
from dragoman.engines.default_weights import default_model
from dragoman.engines.local.gguf_model import LlamaModel
from dragoman.engines.local.llamacpp import OWN_KINDS, LlamaRunner, kept_kinds
from dragoman.engines.local.runner import StepRows

STREAMS, CONTEXT, BATCH = 8, 4352, 512
READ = (4096, 512, 128, 24)
BEHIND = (100, 560)
"""Tokens that answers are written behind."""
_WRITTEN = 24


class Case(Struct):
    name: str
    runner: LlamaRunner
    rates: dict[str, float]
    """The best of each, in tokens a second."""


def read(runner: LlamaRunner, slot: int, count: int) -> float:
    """Tokens a second."""
    runner.truncate(slot, 0)
    began = time.perf_counter()
    start, whole = 0, (count - 1) // runner.prefill_block * runner.prefill_block
    while start < count:
        rows, end = StepRows(), min(start + BATCH, whole if start < whole else count)
        # Any ids do.
        ids = [7919 * number % runner.vocabulary for number in range(start + 1, end + 1)]
        rows.extend(slot, start, ids, [False] * (end - start - 1) + [True])
        if start < whole:
            rows.in_blocks.add(slot)
        runner.step(rows)
        start = end
    return count / (time.perf_counter() - began)


def write(runner: LlamaRunner, streams: int, behind: int) -> float:
    for slot in range(streams):
        read(runner, slot, behind)
    began = time.perf_counter()
    for number in range(_WRITTEN):
        rows = StepRows()
        for slot in range(streams):
            rows.add(slot, behind + number, number)
        runner.step(rows)
    return streams * _WRITTEN / (time.perf_counter() - began)


def measure(runner: LlamaRunner) -> Mapping[str, float]:
    fields = {f"{count} read": read(runner, 0, count) for count in READ}
    fields |= {f"written behind {behind}": write(runner, 1, behind) for behind in BEHIND}
    return {**fields, f"to {STREAMS}": write(runner, STREAMS, 16)}


def run(path: Path, threads: int, rounds: int) -> list[Case]:
    model = LlamaModel(path, gpu_layers=0)
    usual = kept_kinds("auto", model.key_length, several=True)
    kinds = {
        "llama.cpp's own": (OWN_KINDS, False),
        "one reader": (OWN_KINDS, True),
        "several": (usual, False),
        "several, --deterministic": (usual, True),
    }
    with ExitStack() as open_:
        cases = []
        for name, (kept, evenly) in kinds.items():
            runner = LlamaRunner(
                model,
                slots=STREAMS,
                context=CONTEXT,
                batch=BATCH,
                threads=threads,
                flash_attention=True,
                kept=kept,
                batch_invariant=evenly,
            )
            open_.enter_context(closing(runner))
            runner.warm_up()
            cases.append(Case(name, runner, {}))
        for number in range(rounds):
            for case in turns(cases, number):
                print(f"kept: round {number + 1} of {rounds}, {case.name}", flush=True)
                for what, rate in measure(case.runner).items():
                    case.rates[what] = max(rate, case.rates.get(what, 0.0))
    return cases


def table(cases: Sequence[Case], where: str) -> Table:
    first = cases[0].rates
    rows = [
        [each.name, *(f"{rate:.0f} ({rate / first[what]:.2f}x)" for what, rate in each.rates.items())]
        for each in cases
    ]
    return Table("Keys and values of llama.cpp", ("kept as", *first), rows, [f"Tokens/s, the best. {where}."])


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kept", description=__doc__)
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="a GGUF file [default: the default weights]"
    )
    parser.add_argument("--threads", type=int, default=2, help="compute threads [default: 2]")
    parser.add_argument("--rounds", type=int, default=3, help="how many [default: 3]")
    args = parser.parse_args()
    model = args.model or default_model()
    where = f"{model.name}. {machine.describe()}"
    cases = run(model, args.threads, args.rounds)
    keep("kept", [(case.name, case.rates) for case in cases], [table(cases, where)])


if __name__ == "__main__":
    sys.exit(told(cli))
