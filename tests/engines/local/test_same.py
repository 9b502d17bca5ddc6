"""The same question gets the same answer, over the real model. `python -m bench.same` asks more of them."""

import asyncio

import pytest
from bench.runner_texts import prompts
from bench.same import Question, Said, ask, samplings

from dragoman.engines.local import LocalEngine


@pytest.mark.parametrize("kind", [0, 1], ids=["greedy", "seeded"])
def test_company_and_known_prefixes_change_nothing(local_engine: LocalEngine, kind: int) -> None:
    firsts = [tuple(local_engine.tokenizer.encode(words)) for words in prompts(4)]
    asked = [Question(first * 3, (*first, *first[:2], 1)) for first in firsts]
    sampling = samplings(8)[kind]

    async def answers(company: int, known: bool) -> list[Said]:
        return await ask(local_engine, asked, sampling, company=company, known=known)

    async def main() -> tuple[list[Said], list[Said]]:
        return await answers(0, known=False), await answers(3, known=True)

    alone, beside_others = asyncio.run(main())
    assert alone == beside_others
