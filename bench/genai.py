"""The embedded engine beside OpenVINO GenAI, which runs the same GGUF file on the same runtime.

Without HTTP, each in a process of its own, in turns: so many prompts at once, greedy, answers of full
length. GenAI is a package of its own: `pip install openvino-genai`, of the version that OpenVINO has.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from bench import flags, machine, ratios
from bench.drive import drive
from bench.errors import BenchError, told
from bench.pairs import paired, turns
from bench.ratios import Ratio
from bench.runner_texts import prompts
from bench.tables import Table, keep
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.runner_benchmark import peak
from dragoman.types import Job, Sampling

OURS, PLAIN, THEIRS = SIDES = ("dragoman", "dragoman, no guesses", "OpenVINO GenAI")
KV_GIB = 2
REST_S = 4.0


class Options(Struct, frozen=True):
    levels: Sequence[int] = (1, 8, 32)
    tokens: int = 64
    rounds: int = 3


QUICK = Options(levels=(1, 8), tokens=32, rounds=1)


class GenaiResult(Struct, frozen=True):
    rates: list[float]
    """Tokens a second at each level."""
    memory: int


def measure(side: str, model: Path, threads: int, options: Options) -> GenaiResult:
    open_side = _open_theirs if side == THEIRS else _open_ours
    answer, end = open_side(side, model, threads, options)
    rates = []
    try:
        for streams in options.levels:
            texts = [f"{text} ({streams})" for text in islice(prompts(200), streams)]
            # Once for what is prepared at the first step of so many rows, and time for what a server does
            # before it is asked.
            answer(texts, 4)
            time.sleep(REST_S)
            began = time.perf_counter()
            answer([text + "\n" for text in texts], options.tokens)
            rates.append(streams * options.tokens / (time.perf_counter() - began))
    finally:
        end()
    return GenaiResult(rates, peak())


Answer = Callable[[Sequence[str], int], None]


def _open_ours(side: str, model: Path, threads: int, options: Options) -> tuple[Answer, Callable[[], None]]:
    guesses = 0 if side == PLAIN else LocalOptions().guesses
    streams = max(options.levels)
    settings = LocalOptions(
        runner="openvino", threads=threads, slots=streams, guesses=guesses, kv_memory=KV_GIB << 30
    )
    engine = LocalEngine.open(model, settings)

    def answer(texts: Sequence[str], tokens: int) -> None:
        greedy = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        asked = [tuple(engine.tokenizer.encode(text)) for text in texts]
        asyncio.run(drive(engine, [Job(id=str(ids), prompt=ids, sampling=greedy) for ids in asked]))

    return answer, engine.close


def _open_theirs(side: str, model: Path, threads: int, options: Options) -> tuple[Answer, Callable[[], None]]:
    try:
        import openvino_genai as genai
    except ImportError:
        raise BenchError(f"{side} is not installed: pip install openvino-genai.") from None
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size, scheduling.max_num_seqs = KV_GIB, max(options.levels)
    threading: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    pipeline = genai.ContinuousBatchingPipeline(str(model), scheduling, "CPU", threading)

    def answer(texts: Sequence[str], tokens: int) -> None:
        greedy = genai.GenerationConfig()
        greedy.max_new_tokens, greedy.ignore_eos, greedy.do_sample = tokens, True, False
        greedy.apply_chat_template = False
        pipeline.generate(list(texts), [greedy] * len(texts))

    return answer, lambda: None


def in_turns(model: Path, threads: int, options: Options) -> dict[str, list[GenaiResult]]:
    fields: dict[str, list[GenaiResult]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in turns(SIDES, number):
            print(f"genai: round {number + 1} of {options.rounds}, {side}", flush=True)
            order = [side, str(model), str(threads), msgspec.json.encode(options).decode()]
            child = subprocess.run(
                [sys.executable, "-m", "bench.genai", "--side", *order], stdout=subprocess.PIPE, check=False
            )
            if child.returncode:
                raise BenchError(f"{side} failed.")
            fields[side].append(msgspec.json.decode(child.stdout.splitlines()[-1], type=GenaiResult))
    return fields


def table(fields: dict[str, list[GenaiResult]], model: Path, options: Options) -> Table:
    rows = []
    for level, streams in enumerate(options.levels):
        rates = {side: [each.rates[level] for each in fields[side]] for side in SIDES}
        medians = [f"{statistics.median(rates[side]):.1f}" for side in SIDES]
        rows.append([str(streams), *medians, paired(rates[OURS], rates[THEIRS])])
    memory = [f"{max(each.memory for each in fields[side]) >> 20:,} MiB" for side in SIDES]
    rows.append(["peak memory", *memory, ""])
    note = f"{model.name}, {options.tokens} tokens each, {options.rounds} rounds. {machine.describe()}."
    return Table("Beside OpenVINO GenAI, tokens/s", ("streams", *SIDES, "ratio"), rows, [note])


def compared(fields: dict[str, list[GenaiResult]], options: Options) -> Iterator[Ratio]:
    for level, streams in enumerate(options.levels):
        for side in (OURS, PLAIN):
            ours, theirs = ([each.rates[level] for each in fields[one]] for one in (side, THEIRS))
            yield Ratio(f"{streams} streams, {side}", "tokens/s", ours, theirs)
    ours, theirs = ([each.memory / 2**20 for each in fields[side]] for side in (OURS, THEIRS))
    yield Ratio("peak memory", "MiB", ours, theirs, less_is_better=True)


def main(model: Path, threads: int, options: Options) -> None:
    fields = in_turns(model, threads, options)
    keep("genai", fields, [table(fields, model, options)])
    ratios.write("genai", compared(fields, options))


def cli() -> None:
    if sys.argv[1:2] == ["--side"]:
        side, model, threads, options = sys.argv[2:]
        read = msgspec.json.decode(options, type=Options)
        print(msgspec.json.encode(measure(side, Path(model), int(threads), read)).decode())
        return
    args, options_read = flags.read(
        flags.parser("genai", __doc__, Options().rounds, peers=False), Options(), QUICK
    )
    main(args.model, args.threads, options_read)


if __name__ == "__main__":
    sys.exit(told(cli))
