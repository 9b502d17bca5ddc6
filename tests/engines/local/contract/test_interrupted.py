"""Clients leave at any moment: those who stay get their answers, and so does whoever comes afterwards."""

import asyncio
import random

import pytest

from dragoman.types import Job, Step
from tests.engines.local.contract.subject import Subject, SubmittedJob, ends, ids

ROUNDS = 300
LENGTHS = (4, 9, 14, 20, 33)
TOKENS = 5


class Crowd:
    """Rounds of jobs, of which some are cancelled after a random time."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self._subject = subject
        self._random = random.Random(seed)
        self.prompts = [subject._counted(length) for length in LENGTHS]
        self.left = self.stayed = 0

    def job(self, number: int) -> Job:
        """Some share prefixes with what others left, some do not."""
        reuse = self._random.random() < 0.5
        return self._subject.job(self.prompts[number], TOKENS, reuse_prefix=reuse)

    async def round(self) -> list[tuple[int, list[Step]]]:
        """A few jobs, and the steps of those that were not cancelled."""
        numbers = self._random.choices(range(len(self.prompts)), k=self._random.randint(1, 4))
        heard = [(number, SubmittedJob(self._subject.engine, self.job(number))) for number in numbers]
        leaving = [one for one in heard if self._random.random() < 0.5]
        for _, one in leaving:
            await asyncio.sleep(self._random.choice([0, 0, 0.001, 0.004, 0.015]))
            one.handle.cancel()
        self.left += len(leaving)
        self.stayed += len(heard) - len(leaving)
        for _, one in leaving:
            await one.all()
        return [(number, await one.all()) for number, one in heard if (number, one) not in leaving]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [1, 2])
def test_those_who_stay_get_their_answers(subject: Subject, seed: int) -> None:
    crowd = Crowd(subject, seed)
    known = [subject.known(prompt, TOKENS) for prompt in crowd.prompts]
    failed_steps = subject.engine.faults.failed_steps

    async def main() -> None:
        for _ in range(ROUNDS // 2):
            for number, steps in await crowd.round():
                assert ends(steps)[0] in ("length", "stop"), steps[-1].error
                assert ids(steps)[: len(known[number])] == known[number]

    asyncio.run(main())
    assert crowd.left > ROUNDS // 3 and crowd.stayed > ROUNDS // 3
    assert subject.engine.faults.failed_steps == failed_steps


@pytest.mark.thorough
def test_a_bystander_with_a_seed_gets_its_known_answer(subject: Subject) -> None:
    sampling = {"temperature": 1.0, "seed": 7, "ignore_eos": True}
    prompt = subject.prompt
    known = ids(subject.run(prompt, 40, reuse_prefix=False, **sampling))
    alike = ids(subject.run(prompt, 40, reuse_prefix=False, **sampling))
    assert known == alike
    crowd = Crowd(subject, 3)

    async def main() -> None:
        for _ in range(10):
            bystander = SubmittedJob(subject.engine, subject.job(prompt, 40, reuse_prefix=False, **sampling))
            rounds = asyncio.ensure_future(leave(crowd))
            steps = await bystander.all()
            await rounds
            assert ends(steps) == ["length"], steps[-1].error
            if subject.exact:
                assert ids(steps) == known

    async def leave(crowd: Crowd) -> None:
        for _ in range(8):
            await crowd.round()

    asyncio.run(main())
    assert crowd.left > 20
