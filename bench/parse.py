"""The price of reading a token: dragoman's parsers beside vLLM's and SGLang's, on one core.

Every parser gets the same tokens, one at a time, in an interpreter of its own; rounds take turns, and only
the processor time inside the parsers counts. What each of them made of the answer is compared with what was
said, with one token at a time and with 16.

The peers are measured where they are installed. Make an environment for each, and name its Python:
  python -m bench.parse --vllm-python ../vllm/bin/python --sglang-python ../sglang/bin/python
"""

import argparse
import os
import statistics
import sys
from contextlib import ExitStack

from msgspec import Struct
from msgspec.structs import replace

from bench import machine, plots
from bench.errors import told
from bench.parse_cases import Case, cases
from bench.parse_tables import tables
from bench.parse_worker import OURS, SGLANG, VLLM, Outcome, Worker

VARIABLES = {VLLM: "BENCH_VLLM_PYTHON", SGLANG: "BENCH_SGLANG_PYTHON"}
MODULES = {OURS: "bench.parsers.ours", VLLM: "bench.parsers.vllm_own", SGLANG: "bench.parsers.sglang_own"}
VISIT_S = 0.25
"""How long a parser is busy in one round, in as many passes as that takes."""


class Options(Struct, frozen=True):
    rounds: int = 5
    visit_s: float = VISIT_S
    only: list[str] | None = None
    pythons: dict[str, str] = {}
    """The interpreters of the peers."""


QUICK = Options(rounds=3, visit_s=0.05)


def run(options: Options) -> list[Outcome]:
    cores = machine.cores()
    result = cases(options.only)
    pythons = {OURS: sys.executable, **options.pythons}
    os.sched_setaffinity(0, {cores[-1]})
    try:
        with ExitStack() as stack:
            workers = [
                stack.enter_context(Worker(name, python, MODULES[name], cores[0]))
                for name, python in pythons.items()
            ]
            return [outcome for case in result for outcome in _case(case, workers, options)]
    finally:
        os.sched_setaffinity(0, cores)


def _case(case: Case, workers: list[Worker], options: Options) -> list[Outcome]:
    """All parsers on one case. Rounds take turns, so that noise hits all alike."""
    print(f"parse: {case.name}, {len(case.tokens)} tokens", flush=True)
    able = [worker for worker in workers if worker.name_of(case)]
    trials = {worker.name: worker.read(case, passes=1) for worker in able}
    rounds: dict[str, list[float]] = {worker.name: [] for worker in able}
    for _ in range(options.rounds):
        for worker in able:
            trial = trials[worker.name]
            if not trial.error:
                passes = max(1, int(options.visit_s * 1e6 / (trial.us * trial.tokens)))
                rounds[worker.name].append(worker.read(case, passes=passes).us)
    return [_outcome(case, worker, trials[worker.name], rounds[worker.name]) for worker in able]


def _outcome(case: Case, worker: Worker, trial: Outcome, rounds: list[float]) -> Outcome:
    if trial.error:
        return trial
    right_at_16 = worker.read(case, passes=1, chunk=16).right
    return replace(trial, us=statistics.median(rounds), rounds=rounds, right_at_16=right_at_16)


def main(options: Options, plot_folder: str | None) -> None:
    where = machine.describe()
    for name, variable in VARIABLES.items():
        if name not in options.pythons:
            flag = f"--{name.lower()}-python PYTHON"
            print(
                f"parse: NO {name}: name the Python of an environment that has it, with {flag} or {variable}"
            )
    outcomes = run(options)
    tables(outcomes, where, options.rounds)
    right = [each for each in outcomes if each.right and not each.long]
    plots.parse([(each.parser, each.case, each.us) for each in right], plot_folder)


def pythons_of(vllm: str | None = None, sglang: str | None = None) -> dict[str, str]:
    """The interpreters of the peers: flags over the environment."""
    mapping = {VLLM: vllm, SGLANG: sglang}
    fields = {name: mapping[name] or os.environ.get(variable) for name, variable in VARIABLES.items()}
    return {name: python for name, python in fields.items() if python}


def cli() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.parse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--vllm-python", metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--sglang-python", metavar="PYTHON", help="of an environment with SGLang")
    parser.add_argument("--only", metavar="NAME,NAME", help="some formats [default: all]")
    parser.add_argument("--rounds", type=int, help="rounds for each parser [default: 5]")
    parser.add_argument("--quick", action="store_true", help="a short run, for a first look")
    parser.add_argument("--plots", metavar="DIR", help="folder for the plots [default: bench/out]")
    args = parser.parse_args()
    base = QUICK if args.quick else Options()
    only = args.only.split(",") if args.only else None
    pythons = pythons_of(args.vllm_python, args.sglang_python)
    main(Options(args.rounds or base.rounds, base.visit_s, only, pythons), args.plots)


if __name__ == "__main__":
    sys.exit(told(cli))
