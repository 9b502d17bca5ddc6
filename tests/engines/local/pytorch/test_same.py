"""With `deterministic` an answer is the same to the bit: alone and in company, however its prompt is read,
and whatever is guessed."""

import asyncio
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="TORCH IS NOT INSTALLED: make torch")

from msgspec.structs import replace  # noqa: E402

from dragoman.engines.local import LocalEngine, LocalOptions  # noqa: E402
from dragoman.engines.local.options import WeightKind  # noqa: E402
from dragoman.engines.local.speculation import StepCosts  # noqa: E402
from dragoman.types import Job, Sampling, Step  # noqa: E402
from tests.engines.local.contract.subject import SubmittedJob, ids  # noqa: E402
from tests.engines.local.pytorch.models import FAMILIES, VOCABULARY, make  # noqa: E402
from tests.support.tiny_gguf import write_tiny  # noqa: E402

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
        return [told(await SubmittedJob(engine, job).all()) for job in asked]

    async def together() -> list[list[object]]:
        heard = [SubmittedJob(engine, job) for job in asked]
        return [told(await each.all()) for each in heard]

    with closing(LocalEngine.open(tmp_path, options)) as engine:
        assert "deterministic" in engine.card.details["runner"]
        alone = asyncio.run(one_by_one())
    with closing(LocalEngine.open(tmp_path, options)) as engine:
        assert asyncio.run(together()) == alone
        assert asyncio.run(one_by_one()) == alone, "with all prompts known"


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9, "seed": 3},
    {"temperature": 0.0, "frequency_penalty": 0.05},
    {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.01},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(5, 60))},
    {"temperature": 0.5, "seed": 5, "typical_p": 0.9},
)
"""Ways to choose: by rows alone, by rules that know what was said, and with a look at the whole row."""


def repeating(kinds: dict[str, Any], number: int) -> Job:
    sampling = Sampling(max_tokens=60, logprobs=2, ignore_eos=True, **kinds)
    return Job(id=f"{number}", prompt=tuple(range(9)) * 4, sampling=sampling)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_the_same_bits_with_guesses_and_without(family: str, tmp_path: Path) -> None:
    make(tmp_path, family)
    asked = [repeating(kinds, number) for number, kinds in enumerate(KINDS)]

    async def twice(engine: LocalEngine) -> list[list[Step]]:
        """The second time, what was said the first time is guessed."""
        first = [await SubmittedJob(engine, job).all() for job in asked]
        heard = [SubmittedJob(engine, replace(job, id=f"{job.id}-again")) for job in asked]
        return first + [await each.all() for each in heard]

    items = []
    for guesses in (0, 7):
        with closing(LocalEngine.open(tmp_path, replace(OPTIONS, guesses=guesses))) as engine:
            # As if rows cost nothing here, as they do on a GPU.
            engine._scheduler._guesser._costs = StepCosts(1000, math.inf)
            answers = asyncio.run(twice(engine))
        items.append([told(steps) for steps in answers])
    assert items[0] == items[1]
    several = [any(len(step.ids) > 1 for step in steps) for steps in answers]
    assert all(several[len(KINDS) :]), "of each kind some was guessed"


def test_the_same_bits_with_a_draft(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf", layers=2)
    job = repeating({"temperature": 0.0}, 0)
    items = []
    for draft in (None, str(model)):
        options = replace(OPTIONS, context=128, draft=draft, guesses=3 if draft else 0)
        with closing(LocalEngine.open(model, options)) as engine:
            engine._scheduler._guesser._costs = StepCosts(1000, math.inf)
            steps = asyncio.run(heard(engine, job))
        items.append(told(steps))
    assert items[0] == items[1]
    assert max(len(step.ids) for step in steps) > 1, "it was guessed"


async def heard(engine: LocalEngine, job: Job) -> list[Step]:
    return await SubmittedJob(engine, job).all()
