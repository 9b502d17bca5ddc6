"""The same question gets the same answer, over the real model. `python -m bench.same` asks more of them."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
from bench.runner_texts import prompts
from bench.same import Question, Said, ask, samplings

from dragoman.engines.local import LocalEngine, LocalOptions


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


def answers(engine: LocalEngine, repeated: int, kind: int) -> tuple[list[Said], list[Said]]:
    """Alone with a fresh prefix, and beside three others with a known one."""
    firsts = [tuple(engine.tokenizer.encode(words)) for words in prompts(4)]
    asked = [Question(first * repeated, (*first, *first[:2], 1)) for first in firsts]
    sampling = samplings(8)[kind]

    async def both() -> tuple[list[Said], list[Said]]:
        alone = await ask(engine, asked, sampling, company=0, known=False)
        return alone, await ask(engine, asked, sampling, company=3, known=True)

    return asyncio.run(both())
