"""Answers with a draft and without: `python -m bench.draft`, or `--quick` for a first look.

A large model and a small one that agree are not to be had everywhere, so the large one is made of the small:
the default model, with further layers that add nothing to what goes through them. It says what the small one
says, and takes as long as a model of its size. So the draft is right nearly always, which real pairs are not:
this is the most that a draft brings on this machine, and shows what it costs. With `--target` and `--draft`
real files are measured.
"""

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from msgspec import Struct

from bench import machine
from bench.errors import BenchError, told
from bench.tables import OUT, Table, keep, ratio
from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.types import Job, Sampling

TEXTS = (
    "The history of the city of Paris begins",
    "To bake bread at home you need flour, water, salt and",
    "A short list of the planets of our solar system:",
)
EMPTY = ("attn_output.weight", "ffn_down.weight")
"""What a layer adds goes through these; where they are zero, it adds nothing."""


class Options(Struct, frozen=True):
    target: str | None = None
    draft: str | None = None
    times: int = 4
    tokens: int = 96
    rounds: int = 3


QUICK = Options(times=2, tokens=48, rounds=1)


class Case(Struct):
    runner: str
    with_draft: bool
    rates: list[float]
    ids: list[list[int]]
    steps: int = 0


def stretch(source: Path, target: Path, times: int) -> Path:
    """`times` as many layers, of which only the source's own do anything."""
    reader = gguf.GGUFReader(str(source))
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(target), architecture)
    count = int(reader.fields[f"{architecture}.block_count"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value: Any = field.contents() * times if field.name.endswith(".block_count") else field.contents()
        kind, inner = field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        for further in range(1, times if tensor.name.startswith("blk.") else 1):
            data = np.zeros_like(tensor.data) if rest in EMPTY else tensor.data
            name = f"blk.{int(block) + further * count}.{rest}"
            writer.add_tensor(name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


async def answer(engine: LocalEngine, text: str, tokens: int, case: Case) -> None:
    prompt = tuple(engine.tokenizer.encode(text))
    sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    ids: list[int] = []
    first = 0.0
    async for step in engine.generate(Job(id="draft", prompt=prompt, sampling=sampling)):
        ids += step.ids
        case.steps += 1
        first = first or time.perf_counter()
    case.rates.append((tokens - 1) / (time.perf_counter() - first))
    case.ids.append(ids)


def measure(target: Path, draft: Path, runner: str, options: Options) -> list[Case]:
    """Both ways in turns, so that a busy moment meets either."""
    cases = [Case(runner, False, [], []), Case(runner, True, [], [])]
    for _ in range(options.rounds):
        for case in cases:
            how: Any = {"runner": runner, "draft": str(draft) if case.with_draft else None}
            local_options = LocalOptions(context=512, slots=1, deterministic=True, **how)
            engine = LocalEngine.open(target, local_options)
            warm = Case(runner, False, [], [])
            asyncio.run(answer(engine, "Once upon", 16, warm))
            for text in TEXTS:
                asyncio.run(answer(engine, text, options.tokens, case))
            engine.close()
    if cases[0].ids != cases[1].ids:
        raise BenchError(f"With a draft {runner} says something else.")
    return cases


def main(options: Options) -> None:
    draft = Path(options.draft) if options.draft else default_model()
    OUT.mkdir(exist_ok=True)
    target = Path(options.target) if options.target else stretch(draft, OUT / "stretched.gguf", options.times)
    rows, cases = [], []
    for runner in ("llamacpp", "openvino"):
        plain, drafted = measure(target, draft, runner, options)
        cases += [plain, drafted]
        rates = [statistics.median(case.rates) for case in (plain, drafted)]
        tokens = sum(map(len, drafted.ids)) / drafted.steps
        rows.append(
            (runner, f"{rates[0]:.1f}/s", f"{rates[1]:.1f}/s", ratio(rates[1], rates[0]), f"{tokens:.1f}")
        )
    head = ("runner", "alone", "with the draft", "", "tokens a step")
    size, small = (path.stat().st_size / 1e6 for path in (target, draft))
    title = f"One answer at a time of a model of {size:,.0f} MB, with a draft of {small:,.0f} MB"
    keep("draft", cases, [Table(title, head, rows, ["The ids are the same with the draft and without."])])


def cli() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.draft",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="half the size, one round")
    parser.add_argument("--target", metavar="FILE", help="a GGUF file to answer with")
    parser.add_argument("--draft", metavar="FILE", help="a smaller one of the same vocabulary")
    args = parser.parse_args()
    print(machine.describe(), flush=True)
    usual = QUICK if args.quick else Options()
    main(Options(args.target, args.draft, usual.times, usual.tokens, usual.rounds))


if __name__ == "__main__":
    sys.exit(told(cli))
