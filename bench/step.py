"""The embedded engine's own work: what of a step is not the runner, which computes the model.

No HTTP. A clock stands before and behind the runner's step, on the engine's thread; what passes between the
end of one and the beginning of the next is the engine's own: choosing, taking notes, telling, planning. Only
steps in which every stream decodes count.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench import flags, machine, ratios
from bench.drive import KINDS, drive
from bench.errors import BenchError, told
from bench.pairs import turns
from bench.ratios import Ratio
from bench.runner_texts import prompts
from bench.tables import Table, keep
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.opening import open_model
from dragoman.engines.local.options import RunnerName
from dragoman.engines.local.runner import AnyRunner, StepRows
from dragoman.engines.model_files import LLAMA_CPP
from dragoman.engines.sampling import Logits
from dragoman.types import Job, Sampling

RUNNERS: tuple[RunnerName, ...] = ("openvino", "llamacpp")
ASKED: dict[str, dict[str, Any]] = {
    **KINDS,
    "where nobody asks otherwise": dict(LLAMA_CPP),
    "that, and a penalty": {**LLAMA_CPP, "frequency_penalty": 0.5},
}
FEWEST = 8
"""Steps of which a median is worth something."""


class Options(Struct, frozen=True):
    streams: int = 32
    tokens: int = 96
    rounds: int = 5


QUICK = Options(tokens=32, rounds=1)


class Beat(Struct, frozen=True):
    """One step of a runner."""

    began: float
    ended: float
    decoding: int
    """Streams that had one token each in it, where nobody had more."""


class Part(Struct, frozen=True):
    """What one step took, and what passed until the next began."""

    runner_ms: float
    rest_ms: float


class Case(Struct):
    asked: RunnerName
    runner: str
    kind: str
    rounds: list[list[Part]]

    @property
    def parts(self) -> list[Part]:
        return [part for each in self.rounds for part in each]


class Watch:
    """Takes the place of a runner's step."""

    def __init__(self, runner: AnyRunner) -> None:
        self.beats: list[Beat] = []
        self._step = runner.step
        runner.step = self.step  # type: ignore[method-assign]

    def step(self, rows: StepRows) -> Logits:
        began = time.perf_counter()
        logits = self._step(rows)
        ended = time.perf_counter()
        decoding = len(rows) if len(set(rows.slots)) == sum(rows.outputs) == len(rows) else 0
        self.beats.append(Beat(began, ended, decoding))
        return logits

    def parts(self, streams: int) -> Iterator[Part]:
        """Of steps in which so many decode, and whose next one is like that too."""
        for beat, following in pairwise(self.beats):
            if beat.decoding == following.decoding == streams:
                runner, rest = beat.ended - beat.began, following.began - beat.ended
                yield Part(runner * 1000, rest * 1000)


def jobs_of(engine: LocalEngine, options: Options, kind: str, number: int) -> list[Job]:
    sampling = Sampling(max_tokens=options.tokens, ignore_eos=True, seed=number, **ASKED[kind])
    return [
        Job(id=f"{kind}-{number}-{index}", prompt=tuple(engine.tokenizer.encode(text)), sampling=sampling)
        for index, text in enumerate(prompts(options.streams))
    ]


def measure(model: Path, runner: RunnerName, threads: int, options: Options) -> list[Case]:
    settings = LocalOptions(runner=runner, threads=threads, slots=options.streams, context=768)
    opened = open_model(model, settings)
    watch = Watch(opened.runner)
    engine = LocalEngine(opened.runner, opened.tokenizer, opened.card, settings)
    cases = [Case(runner, opened.card.details["runner"], kind, []) for kind in ASKED]
    try:
        for number in range(options.rounds):
            for case in turns(cases, number):
                print(f"step: round {number + 1} of {options.rounds}, {case.runner}, {case.kind}", flush=True)
                watch.beats = []
                asyncio.run(drive(engine, jobs_of(engine, options, case.kind, number)))
                case.rounds.append(list(watch.parts(options.streams)))
    finally:
        engine.close()
    return cases


def run(model: Path, threads: int, options: Options) -> list[Case]:
    cases = [case for runner in RUNNERS for case in measure(model, runner, threads, options)]
    for case in cases:
        if len(case.parts) < FEWEST:
            raise BenchError(f"{options.streams} streams were together for {len(case.parts)} steps only.")
    return cases


def table(cases: Sequence[Case], options: Options, where: str) -> Table:
    rows = []
    for case in cases:
        runner = statistics.median(part.runner_ms for part in case.parts)
        rest = statistics.median(part.rest_ms for part in case.parts)
        share = statistics.median(part.rest_ms / (part.runner_ms + part.rest_ms) for part in case.parts)
        rows.append(
            [case.runner, case.kind, f"{runner:.2f}", f"{rest:.2f}", f"{share:.1%}", str(len(case.parts))]
        )
    head = ("runner", "sampling", "runner ms", "rest ms", "rest of the step", "steps")
    return Table("The engine's own work", head, rows, [f"{options.streams} streams, medians. {where}."])


def compared(cases: Sequence[Case]) -> Iterator[Ratio]:
    """The engine's own work, as a part of a step."""
    for case in cases:
        rounds = [parts for parts in case.rounds if parts]
        rest = [statistics.median(part.rest_ms for part in parts) for parts in rounds]
        whole = [statistics.median(part.runner_ms + part.rest_ms for part in parts) for parts in rounds]
        yield Ratio(f"{case.asked}, {case.kind}", "ms", rest, whole)


def main(model: Path, threads: int, options: Options) -> None:
    where = machine.describe()
    cases = run(model, threads, options)
    keep("step", cases, [table(cases, options, f"{model.name}. {where}")])
    ratios.write("step", compared(cases))


def cli() -> None:
    parser = flags.parser("step", __doc__, Options().rounds, peers=False)
    parser.add_argument("--streams", type=int, help="streams at the same time [default: 32]")
    parser.add_argument("--tokens", type=int, help="tokens of an answer [default: 96]")
    args, options = flags.read(parser, Options(), QUICK)
    main(args.model, args.threads, options)


if __name__ == "__main__":
    sys.exit(told(cli))
