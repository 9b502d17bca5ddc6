"""With `deterministic` an answer is the same to the bit: alone and in company, however its prompt is read."""

import asyncio
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="TORCH IS NOT INSTALLED: make torch")

from msgspec.structs import replace  # noqa: E402

from dragoman.engines.local import LocalEngine, LocalOptions  # noqa: E402
from dragoman.engines.local.options import WeightKind  # noqa: E402
from dragoman.types import Job, Sampling, Step  # noqa: E402
from tests.engines.local.contract.subject import Heard, ids  # noqa: E402
from tests.engines.local.pytorch.models import FAMILIES, VOCABULARY, make  # noqa: E402

OPTIONS = LocalOptions(
    runner="torch", slots=7, context=256, batch=48, chunk=20, threads=1, deterministic=True
)
RANDOM = np.random.default_rng(5)
LENGTHS = (3, 17, 40, 41, 64, 75, 90)


def jobs() -> list[Job]:
    prompts = [tuple(RANDOM.integers(0, VOCABULARY, length).tolist()) for length in LENGTHS]
    # One of them goes on from another, whose pages it finds.
    prompts[-1] = prompts[3] + prompts[-1]
    return [
        Job(
            id=f"{number}",
            prompt=prompt,
            sampling=Sampling(
                max_tokens=12, logprobs=2, seed=number, temperature=number % 2 * 1.0, ignore_eos=True
            ),
        )
        for number, prompt in enumerate(prompts)
    ]


def told(steps: list[Step]) -> list[object]:
    return [ids(steps), [entry for step in steps for entry in step.logprobs or ()]]


@pytest.mark.parametrize(
    ("family", "weights"), [*((family, "auto") for family in FAMILIES), ("llama", "int8"), ("llama", "fp8")]
)
def test_the_same_bits_alone_and_in_company(family: str, weights: WeightKind, tmp_path: Path) -> None:
    make(tmp_path, family)
    options = replace(OPTIONS, weights=weights)
    asked = jobs()

    async def one_by_one() -> list[list[object]]:
        return [told(await Heard(engine, job).all()) for job in asked]

    async def together() -> list[list[object]]:
        heard = [Heard(engine, job) for job in asked]
        return [told(await each.all()) for each in heard]

    with closing(LocalEngine.open(tmp_path, options)) as engine:
        assert "deterministic" in engine.card.details["runner"]
        alone = asyncio.run(one_by_one())
    with closing(LocalEngine.open(tmp_path, options)) as engine:
        assert asyncio.run(together()) == alone
        assert asyncio.run(one_by_one()) == alone, "with all prompts known"
