"""What is computed again and what is not; and that nobody's answer shows it."""

import asyncio
from typing import Any

import pytest

from dragoman.types import Step
from tests.engines.local.contract.subject import Gate, Subject, ids


def test_the_same_prompt_again_computes_only_its_last_token(subject: Subject) -> None:
    known = subject.known(subject.prompt)
    for cached in (0, len(subject.prompt) - 1):
        steps = subject.run(subject.prompt)
        assert steps[0].cached_tokens == cached
        assert ids(steps)[: len(known)] == known


def test_a_conversation_goes_on_from_its_own_answer(subject: Subject) -> None:
    answer = ids(subject.run(subject.prompt, 4))
    longer = [*subject.prompt, *answer, *subject.prompt[:5]]
    known = subject.known(longer)
    steps = subject.run(longer)
    # The last id of an answer has not been computed when the answer ends.
    spared = 0 if subject.rereads else 3
    assert steps[0].cached_tokens == len(subject.prompt) + spared
    assert ids(steps)[: len(known)] == known


def test_a_prefix_is_taken_from_one_who_still_answers(subject: Subject) -> None:
    longer = [*subject.prompt, *subject.prompt[:5]]
    known = subject.known(longer)

    async def main() -> list[Step]:
        running = subject.engine.generate(subject.job(subject.prompt, 100, ignore_eos=True))
        await anext(running)
        try:
            return await subject.collect(longer)
        finally:
            await running.aclose()

    steps = asyncio.run(main())
    assert steps[0].cached_tokens == len(subject.prompt)
    assert ids(steps)[: len(known)] == known


def test_continuations_share_one_reading_of_the_prompt(subject: Subject) -> None:
    with Gate(subject.runner) as gate:
        subject.run(subject.prompt, 1, n=4)
    assert gate.rows < 2 * len(subject.prompt)


def test_a_prefix_that_is_being_computed_is_waited_for(subject: Subject) -> None:
    prompts = [[*subject.prompt, 50 + number] for number in range(4)]
    with Gate(subject.runner) as gate:
        subject.together(*(subject.job(prompt, 1) for prompt in prompts))
    assert gate.rows < 2 * len(subject.prompt)


@pytest.mark.parametrize("apart", [{"cache_salt": "another"}, {"reuse_prefix": False}])
def test_nothing_is_shared_across(subject: Subject, apart: dict[str, Any]) -> None:
    subject.run(subject.prompt, 1)
    known = subject.known(subject.prompt)
    steps = subject.run(subject.prompt, **apart)
    assert steps[0].cached_tokens == 0
    assert ids(steps)[: len(known)] == known


def test_a_private_job_leaves_nothing(subject: Subject) -> None:
    subject.run(subject.prompt, 1, reuse_prefix=False)
    assert subject.run(subject.prompt, 1)[0].cached_tokens == 0
