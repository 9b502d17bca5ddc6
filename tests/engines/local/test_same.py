"""The same question gets the same answer, over the real model. `python -m bench.same` asks more of them."""

import asyncio
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from bench.runner_texts import prompts
from bench.same import Question, Said, ask, samplings

from dragoman.engines.choosing import Logits
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.opening import open_model
from dragoman.engines.local.runner import AnyRunner, Rows

LENGTH = 530


@pytest.mark.parametrize("kind", [0, 1], ids=["greedy", "seeded"])
def test_company_and_known_prefixes_change_nothing(local_engine: LocalEngine, kind: int) -> None:
    alone, beside_others = answers(local_engine, 3, kind)
    assert alone == beside_others


def test_nor_do_they_with_llamacpp_that_is_deterministic(weights: Path) -> None:
    options = LocalOptions(runner="llamacpp", deterministic=True, threads=2, slots=4, context=512)
    # From 64 tokens on its attention has another way.
    with closing(LocalEngine.open(weights, options)) as engine:
        alone, beside_others = answers(engine, 12, kind=1)
    assert alone == beside_others


def test_nor_does_where_a_prompt_is_cut_with_llamacpp_that_is_deterministic(weights: Path) -> None:
    options = LocalOptions(runner="llamacpp", deterministic=True, threads=2, slots=2, context=768)
    runner = open_model(weights, options).runner
    with closing(runner):
        runner.warm_up()
        # From 512 tokens on its attention has another way for a single row.
        whole, pieces = read(runner, 0, 512), read(runner, 1, 60)
        assert np.array_equal(whole, pieces)
        alone, beside = Rows(), Rows()
        alone.add(0, LENGTH, 7)
        beside.add(1, LENGTH, 7)
        beside.extend(0, LENGTH + 1, [8, 9], [False, False])
        row = runner.step(alone)[0].copy()
        assert np.array_equal(row, runner.step(beside)[0])


def read(runner: AnyRunner, slot: int, piece: int) -> Logits:
    """What comes after a prompt, read in pieces."""
    for start in range(0, LENGTH, piece):
        rows, count = Rows(), min(piece, LENGTH - start)
        rows.extend(slot, start, range(start, start + count), [False] * (count - 1) + [True])
        logits: Logits = runner.step(rows)[0].copy()
    return logits


def answers(engine: LocalEngine, repeated: int, kind: int) -> tuple[list[Said], list[Said]]:
    """Alone with a fresh prefix, and beside three others with a known one."""
    firsts = [tuple(engine.tokenizer.encode(words)) for words in prompts(4)]
    asked = [Question(first * repeated, (*first, *first[:2], 1)) for first in firsts]
    sampling = samplings(8)[kind]

    async def both() -> tuple[list[Said], list[Said]]:
        alone = await ask(engine, asked, sampling, company=0, known=False)
        return alone, await ask(engine, asked, sampling, company=3, known=True)

    return asyncio.run(both())
