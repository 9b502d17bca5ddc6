"""Whether the runners of the embedded engine say the same: a text's perplexity, the first token of prompts.

Their kernels round differently, so log probabilities differ in the second digit, and where two tokens are as
likely as each other either may come first. The command ends with an error where they differ by more.
"""

import argparse
import asyncio
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bench import machine
from bench.errors import BenchError, told
from bench.runner_texts import TEXT, prompts
from bench.tables import Table, keep
from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.openvino import tensors
from dragoman.engines.local.options import KVDtypeOption, RunnerName
from dragoman.types import Job, Sampling, Step, TokenLogprob

CASES: tuple[tuple[RunnerName, KVDtypeOption], ...] = (
    ("llamacpp", "f16"),
    ("llamacpp", "auto"),
    ("llamacpp", "int8"),
    ("openvino", "auto"),
    ("openvino", "int8"),
)
WINDOW = 1024
"""Tokens that are read in one piece, to know how likely each of them was."""
TOLERANCE = 0.25
"""Most that the log probability of a first token may differ in the middle of all prompts."""
_PAGES = Path(__file__).parent.parent / "docs"
_TOGETHER = 8
_TOP = 20
_GREEDY = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)


class RunnerResult(Struct):
    runner: str
    kv_cache: str
    perplexity: float
    firsts: list[TokenLogprob]
    """What each runner says first after each prompt, and what else it might have said."""


class Agreement(Struct, frozen=True):
    same: int
    """Prompts after which both say the same token."""
    close: int
    """Those after which each says what is as likely as its own choice to the other, within the tolerance."""
    difference: float
    """Of the log probability of one runner's first token, in the middle of all prompts."""
    worst: float


def agreement(first: Sequence[TokenLogprob], second: Sequence[TokenLogprob]) -> Agreement:
    same = close = 0
    differences = []
    for one, other in zip(first, second, strict=True):
        mapping = dict(other.top)
        differences.append(abs(one.logprob - mapping[one.id]) if one.id in mapping else math.inf)
        same += one.id == other.id
        close += one.id in mapping and other.logprob - mapping[one.id] <= TOLERANCE
    return Agreement(same, close, statistics.median(differences), max(differences))


class RunnerRequest(Struct, frozen=True):
    model: Path
    prompts: int
    windows: int
    threads: int
    readers: int = 1
    """For several, weights of four bits become int8."""


def measure(runner: RunnerName, kv_cache: KVDtypeOption, asked: RunnerRequest) -> RunnerResult:
    options = LocalOptions(
        runner=runner,
        kv_cache=kv_cache,
        threads=asked.threads,
        readers=asked.readers,
        slots=_TOGETHER,
        context=2 * WINDOW,
    )
    engine = LocalEngine.open(asked.model, options)
    try:
        return asyncio.run(_measure(engine, runner, kv_cache, asked))
    finally:
        engine.close()


async def _measure(engine: LocalEngine, runner: str, kv_cache: str, asked_for: RunnerRequest) -> RunnerResult:
    text = engine.tokenizer.encode(TEXT + "".join(page.read_text() for page in sorted(_PAGES.glob("*.md"))))
    known = []
    for start in range(0, asked_for.windows * WINDOW, WINDOW):
        piece = text[start : start + WINDOW]
        step = await _first(engine, piece, replace(_GREEDY, prompt_logprobs=0))
        known += [entry.logprob for entry in step.prompt_logprobs or () if entry is not None]
    firsts = []
    for batch in _batches(list(prompts(asked_for.prompts))):
        asked = [
            _first(engine, engine.tokenizer.encode(text), replace(_GREEDY, logprobs=_TOP)) for text in batch
        ]
        firsts += [entry for step in await asyncio.gather(*asked) for entry in step.logprobs or ()]
    return RunnerResult(runner, kv_cache, math.exp(-statistics.fmean(known)), firsts)


async def _first(engine: LocalEngine, ids: Sequence[int], asked: Sampling) -> Step:
    async for step in engine.generate(Job(id="bench", prompt=tuple(ids), sampling=asked)):
        if step.error is not None:
            raise step.error
        return step
    raise BenchError("The engine said nothing.")


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(texts), _TOGETHER):
        yield texts[start : start + _TOGETHER]


def table(results: Sequence[RunnerResult], asked: RunnerRequest) -> Table:
    rows, count = [], asked.prompts
    for each in results:
        agreed = agreement(results[0].firsts, each.firsts)
        ratio = each.perplexity / results[0].perplexity - 1
        figures = [
            f"{each.perplexity:.3f}",
            f"{ratio:+.2%}",
            f"{agreed.same} of {count}",
            f"{agreed.close} of {count}",
        ]
        rows.append([each.runner, each.kv_cache, *figures, f"{agreed.difference:.3f}", f"{agreed.worst:.2f}"])
    head = (
        "runner",
        "kv cache",
        "perplexity",
        "of the first",
        "same first",
        "as likely",
        "middle difference",
        "worst",
    )
    where = f"{asked.model.name}. {machine.describe()}"
    text = f"{asked.windows * WINDOW:,} tokens of text and {count} prompts"
    note = f"{text}. Against the first row; `as likely` is within {TOLERANCE}. {where}."
    return Table("What the runners say", head, rows, [note])


def main(asked: RunnerRequest, cases: Sequence[tuple[RunnerName, KVDtypeOption]] = CASES) -> None:
    results = []
    for runner, kv_cache in cases:
        print(f"runners: {runner}, {kv_cache}", flush=True)
        results.append(measure(runner, kv_cache, asked))
    keep("runners", results, [table(results, asked)])
    for each in results:
        agreed = agreement(results[0].firsts, each.firsts)
        if agreed.difference > TOLERANCE or agreed.close < 0.95 * asked.prompts:
            raise BenchError(f"{each.runner} with {each.kv_cache} differs from {results[0].runner}.")


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.runners", description=__doc__)
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="a GGUF file [default: the default weights]"
    )
    parser.add_argument("--prompts", type=int, default=200, help="how many [default: 200]")
    parser.add_argument("--windows", type=int, default=16, help=f"of {WINDOW} tokens [default: 16]")
    parser.add_argument("--threads", type=int, default=2, help="compute threads [default: 2]")
    parser.add_argument("--readers", type=int, default=1, help="for whom OpenVINO has weights [default: 1]")
    parser.add_argument("--quick", action="store_true", help="the usual keys and values only")
    parser.add_argument(
        "--four-bits", action="store_true", help="OpenVINO keeps four bits however small the file is"
    )
    args = parser.parse_args()
    asked = RunnerRequest(
        args.model or default_model(), args.prompts, args.windows, args.threads, args.readers
    )
    cases = [case for case in CASES if case[1] == "auto" or not args.quick]
    if not args.four_bits:
        return main(asked, cases)
    with tempfile.TemporaryDirectory() as folder:
        # What is converted so is for nobody else.
        os.environ["DRAGOMAN_CACHE"], tensors.LARGE = folder, 0
        return main(asked, cases)


if __name__ == "__main__":
    sys.exit(told(cli))
