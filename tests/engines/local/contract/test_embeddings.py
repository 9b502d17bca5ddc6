"""Vectors, made between the steps of those who generate."""

import asyncio

import numpy as np
import pytest

from tests.engines.local.contract.subject import Subject, ids


def test_one_vector_of_length_one_for_each_prompt_in_order(subject: Subject) -> None:
    prompts = [subject.prompt, subject.prompt[:5], subject.prompt]
    first, other, again = np.array(asyncio.run(subject.engine.embed(prompts)))
    assert [np.linalg.norm(vector) for vector in (first, other, again)] == pytest.approx([1, 1, 1])
    assert first == pytest.approx(again)
    assert not np.allclose(first, other, atol=1e-3)


def test_they_and_answers_do_not_disturb_each_other(subject: Subject) -> None:
    """The long prompt is computed in pieces, with steps of an answer between them."""
    long = (subject.prompt * 9)[:140]
    known = subject.known(subject.prompt, 8)

    async def main() -> tuple[list[list[float]], list[int]]:
        answering = asyncio.create_task(subject.collect(subject.prompt, 8))
        vectors = await subject.engine.embed([long, long])
        return vectors, ids(await answering)

    (first, second), answer = asyncio.run(main())
    assert first == pytest.approx(second)
    assert answer[: len(known)] == known


def test_who_does_not_wait_for_them_is_forgotten(subject: Subject) -> None:
    async def main() -> None:
        waiting = asyncio.create_task(subject.engine.embed([subject.prompt] * 1000))
        await asyncio.sleep(0)
        waiting.cancel()
        await subject.engine.check()
        assert len(ids(await subject.collect(subject.prompt))) == 6
        assert not subject.engine._worker._embeddings

    asyncio.run(main())
