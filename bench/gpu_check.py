"""Whether the runner over PyTorch computes what it should on the machine that is there: `bench.gpu --check`.

Tiny random models of each family. Log probabilities of a prompt are compared with those of `transformers` in
float32; answers, to the bit, with the same answers in company; and then the contract of all runners is run.
"""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from tests.engines.local.pytorch.models import FAMILIES, VOCABULARY, make

from bench.errors import BenchError
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.types import Job, Sampling, Step

CONTRACT = [sys.executable, "-m", "pytest", "-q", "tests/engines/local/contract", "-k", "torch"]
APART = {"float32": 1e-3, "bfloat16": 1.0}
"""The median of what a log probability may differ by. These models are sure of what they say: their logits
are large, and rounding with them; on a CPU bfloat16 differs by up to 0.43."""
OPTIONS = LocalOptions(runner="torch", slots=16, context=256, batch=96, chunk=40, deterministic=True)
RANDOM = np.random.default_rng(0)


async def answer(engine: LocalEngine, jobs: Sequence[Job]) -> list[list[Step]]:
    async def one(job: Job) -> list[Step]:
        return [step async for step in engine.generate(job)]

    return await asyncio.gather(*(one(job) for job in jobs))


def jobs_of(count: int) -> list[Job]:
    found = []
    for number in range(count):
        prompt = tuple(RANDOM.integers(0, VOCABULARY, 3 + 11 * number % 150).tolist())
        heat = 1.0 if number % 2 else 0.0
        sampling = Sampling(max_tokens=24, temperature=heat, seed=number, logprobs=0, ignore_eos=True)
        found.append(Job(id=f"{number}", prompt=prompt, sampling=sampling))
    return found


def apart(model: Any, engine: LocalEngine) -> float:
    """The median of how far log probabilities of a prompt are from those of `transformers`."""
    import torch

    ids = RANDOM.integers(0, VOCABULARY, 200).tolist()
    sampling = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    [[step]] = asyncio.run(answer(engine, [Job(id="prompt", prompt=tuple(ids), sampling=sampling)]))
    with torch.no_grad():
        rows = model.cpu()(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    found = [entry.logprob for entry in step.prompt_logprobs or () if entry is not None]
    return float(np.median(np.abs(np.array(found) - expected)))


def told(steps: Sequence[Step]) -> list[object]:
    return [(step.ids, step.logprobs) for step in steps]


def check_family(family: str, folder: Path) -> str:
    """Raises BenchError for what is not as it should be."""
    model = make(folder, family)
    jobs = jobs_of(12)
    with closing(LocalEngine.open(folder, OPTIONS)) as engine:
        kind = "bfloat16" if "bfloat16" in engine.card.details["runner"] else "float32"
        found = apart(model, engine)
        if not found <= APART[kind]:
            raise BenchError(f"{family}: log probabilities are apart by {found:.3g} ({kind}).")
        alone = [told(asyncio.run(answer(engine, [job]))[0]) for job in jobs]
    with closing(LocalEngine.open(folder, OPTIONS)) as engine:
        together = [told(steps) for steps in asyncio.run(answer(engine, jobs))]
    if differing := [job.id for job, a, b in zip(jobs, alone, together, strict=True) if a != b]:
        raise BenchError(f"{family}: {len(differing)} of {len(jobs)} answers differ in company.")
    return (
        f"{family}: apart by {found:.2g} from transformers ({kind}), {len(jobs)} answers the same in company"
    )


def check(families: Sequence[str] = tuple(FAMILIES), contract: bool = True) -> None:
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            print(check_family(family, Path(folder)), flush=True)
    if contract and subprocess.run(CONTRACT, check=False).returncode:
        raise BenchError("The contract of runners is not kept; see above.")
