"""Whether the runner over PyTorch computes what it should on the machine that is there: `bench.gpu --check`.

Tiny random models of each family, two of them also with weights of eight bits. Log probabilities of a prompt
are compared with those of `transformers` in float32; answers, to the bit, with the same answers in company
and without guesses. Products of eight bits are compared with exact ones, a GGUF file with llama.cpp, weights
that another process has lent with the same ones from a file; and then the contract of all runners is run.
"""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
from msgspec.structs import replace
from tests.engines.local.pytorch.models import FAMILIES, VOCABULARY, make
from tests.support.tiny_gguf import write_tiny

from bench.errors import BenchError
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.engine import TrainableEngine
from dragoman.engines.local.options import WeightKind
from dragoman.engines.local.pytorch.quantized import KINDS, QuantizedMatrix, multiply
from dragoman.engines.local.pytorch.weights import read_tensors
from dragoman.types import Job, Sampling, Step

CONTRACT = [sys.executable, "-m", "pytest", "-q", "tests/engines/local/contract", "-k", "torch"]
APART = {"float32": 1e-3, "bfloat16": 1.0, "int8": 2.0, "fp8": 4.0}
"""The median of what a log probability may differ by. These models are sure of what they say: their logits
are large, and rounding with them; on a CPU bfloat16 differs by up to 0.43."""
OPTIONS = LocalOptions(runner="torch", slots=16, context=256, batch=96, chunk=40, deterministic=True)
ROUNDED = ("llama", "qwen3_moe")
"""Families that are also run with weights of eight bits."""
ROWS = (1, 16, 17, 64, 65, 256, 300)
"""Of products: each number is computed in another way."""
RANDOM = np.random.default_rng(0)


async def answer(engine: LocalEngine, jobs: Sequence[Job]) -> list[list[Step]]:
    async def one(job: Job) -> list[Step]:
        return [step async for step in engine.generate(job)]

    return await asyncio.gather(*(one(job) for job in jobs))


def jobs_of(count: int) -> list[Job]:
    jobs = []
    for number in range(count):
        prompt = tuple(RANDOM.integers(0, VOCABULARY, 3 + 11 * number % 150).tolist())
        heat = 1.0 if number % 2 else 0.0
        penalty = 0.1 if number % 3 else 0.0
        sampling = Sampling(
            max_tokens=60,
            temperature=heat,
            seed=number,
            logprobs=0,
            ignore_eos=True,
            frequency_penalty=penalty,
        )
        jobs.append(Job(id=f"{number}", prompt=prompt, sampling=sampling))
    return jobs


def apart(model: Any, engine: LocalEngine) -> float:
    """The median of how far log probabilities of a prompt are from those of `transformers`."""
    import torch

    ids = RANDOM.integers(0, VOCABULARY, 200).tolist()
    sampling = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    [[step]] = asyncio.run(answer(engine, [Job(id="prompt", prompt=tuple(ids), sampling=sampling)]))
    with torch.no_grad():
        rows = model.cpu()(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    values = [entry.logprob for entry in step.prompt_logprobs or () if entry is not None]
    return float(np.median(np.abs(np.array(values) - expected)))


def told(steps: Sequence[Step]) -> list[object]:
    ids = [id_ for step in steps for id_ in step.ids]
    return [ids, [entry for step in steps for entry in step.logprobs or ()]]


def check_family(family: str, folder: Path, weights: WeightKind = "auto") -> str:
    """Raises BenchError for what is not as it should be."""
    model = make(folder, family)
    jobs = jobs_of(12)
    options = replace(OPTIONS, weights=weights)
    with closing(LocalEngine.open(folder, options)) as engine:
        kind = "bfloat16" if "bfloat16" in engine.card.details["runner"] else "float32"
        kind = kind if weights == "auto" else weights
        value = apart(model, engine)
        if not value <= APART[kind]:
            raise BenchError(f"{family}: log probabilities are apart by {value:.3g} ({kind}).")
        steps = [asyncio.run(answer(engine, [job]))[0] for job in jobs]
    alone = [told(each) for each in steps]
    guessed = sum(max(0, len(step.ids) - 1) for each in steps for step in each)
    for where, other in (("in company", options), ("without guesses", replace(options, guesses=0))):
        with closing(LocalEngine.open(folder, other)) as engine:
            found_there = [told(steps) for steps in asyncio.run(answer(engine, jobs))]
        if differing := [job.id for job, a, b in zip(jobs, alone, found_there, strict=True) if a != b]:
            raise BenchError(f"{family}: {len(differing)} of {len(jobs)} answers differ {where}.")
    return (
        f"{family}, {kind}: apart by {value:.2g} from transformers; {len(jobs)} answers the same in company,"
        f" and without guesses, of which {guessed} were right"
    )


def check_products() -> str:
    """Products with weights of eight bits, beside those with what they stand for, for each way to compute."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    worst = dict.fromkeys(KINDS, 0.0)
    for name, rows, (outputs, width) in product(KINDS, ROWS, ((96, 80), (2048, 1024))):
        states, values = (torch.randn(count, width, device=device) for count in (rows, outputs))
        states, bias = states.bfloat16(), torch.randn(outputs, device=device).bfloat16()
        kept = QuantizedMatrix(
            torch.empty_like(values, dtype=KINDS[name]), torch.empty(outputs, 1, device=device)
        )
        kept.copy_(values)
        exact = states.double() @ kept.widen(torch.float32).double().t() + bias.double()
        apart = (multiply(states, kept, bias).double() - exact).abs().max() / exact.std()
        worst[name] = max(worst[name], float(apart))
    text = ", ".join(f"{name} {value:.2g}" for name, value in worst.items())
    if not (worst["int8"] < 0.03 and worst["fp8"] < 0.3):
        raise BenchError(f"Products of eight bits are apart by {text} of what is usual.")
    return f"products of eight bits: apart by at most {text} of what is usual"


def check_gguf(folder: Path) -> str:
    """What is said of a prompt, beside what llama.cpp says of it."""
    path = write_tiny(folder / "tiny.gguf", layers=2)
    sampling = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    asked = Job(id="prompt", prompt=tuple(RANDOM.integers(0, 262, 60).tolist()), sampling=sampling)
    items = []
    usual = LocalOptions(runner="torch", slots=1, context=128)
    for options in (usual, replace(usual, runner="llamacpp", kv_cache="f16")):
        with closing(LocalEngine.open(path, options)) as engine:
            [[step]] = asyncio.run(answer(engine, [asked]))
        items.append([entry.logprob for entry in step.prompt_logprobs or () if entry is not None])
    apart = float(np.median(np.abs(np.array(items[0]) - items[1])))
    if not apart <= APART["bfloat16"]:
        raise BenchError(f"GGUF: log probabilities are apart by {apart:.3g} from llama.cpp.")
    return f"GGUF: apart by {apart:.2g} from llama.cpp"


def check_lent(folder: Path) -> str:
    """Weights of another process, of which only handles come: on a GPU nothing is copied on the way."""
    from torch.multiprocessing import get_context

    for number, name in enumerate(("old", "new")):
        make(folder / name, seed=1 + number)
    jobs = jobs_of(4)
    with closing(LocalEngine.open(folder / "new", OPTIONS)) as engine:
        expected = [told(steps) for steps in asyncio.run(answer(engine, jobs))]
    here, there = get_context("spawn").Pipe()
    lender = get_context("spawn").Process(target=lend, args=(folder / "new", there))
    lender.start()
    with closing(LocalEngine.open(folder / "old", OPTIONS)) as engine:
        assert isinstance(engine, TrainableEngine)
        before = [told(steps) for steps in asyncio.run(answer(engine, jobs))]
        asyncio.run(engine.update_weights(here.recv(), "2"))
        after = [told(steps) for steps in asyncio.run(answer(engine, jobs))]
    here.send("done")
    lender.join()
    if before == expected or after != expected:
        raise BenchError("Weights that another process has lent give other answers than from a file.")
    return "weights of another process: the same answers as from a file"


def lend(folder: Path, there: Any) -> None:
    """In a process of its own: it holds the weights until they have been taken."""
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    device = "cuda" if torch.cuda.is_available() else "cpu"
    named = {name: tensor.to(device) for name, tensor in read_tensors(folder)}
    there.send({name: reduce_tensor(tensor) for name, tensor in named.items()})
    there.recv()


def check(
    families: Sequence[str] = tuple(FAMILIES), contract: bool = True, rounded: Sequence[str] = ROUNDED
) -> None:
    asked: list[tuple[str, WeightKind]] = [(family, "auto") for family in families]
    asked += [(family, kind) for family in rounded for kind in get_args(WeightKind) if kind in KINDS]
    for family, kind in asked:
        with tempfile.TemporaryDirectory() as folder:
            print(check_family(family, Path(folder), kind), flush=True)
    print(check_products(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print(check_gguf(Path(folder)), flush=True)
        print(check_lent(Path(folder)), flush=True)
    if contract and subprocess.run(CONTRACT, check=False).returncode:
        raise BenchError("The contract of runners is not kept; see above.")
