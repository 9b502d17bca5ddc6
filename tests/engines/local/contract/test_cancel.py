"""A cancel is heard before the next step, and ends what it names and nothing else."""

import asyncio

from dragoman.types import Step
from tests.engines.local.contract.subject import Gate, Subject, SubmittedJob, ends, ids
from tests.support.wait import becomes_async


def test_closing_the_iterator_cancels(subject: Subject) -> None:
    async def main() -> None:
        steps = subject.engine.generate(subject.job(subject.prompt, 150, n=4, ignore_eos=True))
        await anext(steps)
        await steps.aclose()
        await subject.engine.check()
        scheduler = subject.engine._worker._scheduler
        assert not scheduler.owners
        # A step that had begun on the card may have to land.
        await becomes_async(lambda: not scheduler.busy)

    asyncio.run(main())


def cancelled(subject: Subject, n: int, index: int | None = None, times: int = 1) -> list[Step]:
    """The steps of a job that is cancelled while its first step waits to be computed."""

    async def main(gate: Gate) -> list[Step]:
        gate.shut()
        heard = SubmittedJob(subject.engine, subject.job(subject.prompt, 6, n=n, ignore_eos=True))
        await gate.reached()
        for _ in range(times):
            heard.handle.cancel(index)
        gate.open()
        return await heard.all()

    with Gate(subject.runner) as gate:
        return asyncio.run(main(gate))


def test_all_of_a_job(subject: Subject) -> None:
    steps = cancelled(subject, n=3)
    assert ends(steps) == ["abort"] * 3
    assert all(len(ids(steps, index)) <= 1 for index in range(3)), "the step that was begun may be told"


def test_one_continuation(subject: Subject) -> None:
    known = subject.known(subject.prompt)
    steps = cancelled(subject, n=2, index=1)
    assert [step.finish for step in steps if step.finish and step.index == 1] == ["abort"]
    assert len(ids(steps, 0)) == 6
    assert ids(steps, 0)[: len(known)] == known


def test_the_continuation_that_reads_the_prompt_for_the_others(subject: Subject) -> None:
    known = subject.known(subject.prompt)
    steps = cancelled(subject, n=2, index=0)
    assert [step.finish for step in steps if step.finish and step.index == 0] == ["abort"]
    assert ids(steps, 1)[: len(known)] == known


def test_twice_is_once(subject: Subject) -> None:
    assert ends(cancelled(subject, n=1, times=3)) == ["abort"]


def test_after_the_end_it_says_nothing(subject: Subject) -> None:
    async def main() -> list[Step]:
        heard = SubmittedJob(subject.engine, subject.job(subject.prompt, 2))
        await heard.all()
        heard.handle.cancel()
        await subject.engine.check()
        return heard.steps

    assert ends(asyncio.run(main())) == ["length"]


def test_one_that_still_waits_for_a_place(subject: Subject) -> None:
    async def main(gate: Gate) -> tuple[list[Step], list[Step]]:
        gate.shut()
        running = SubmittedJob(subject.engine, subject.job([9], 3, n=subject.runner.slots, ignore_eos=True))
        await gate.reached()
        waiting = SubmittedJob(subject.engine, subject.job([10], 3))
        waiting.handle.cancel()
        gate.open()
        return await waiting.all(), await running.all()

    with Gate(subject.runner) as gate:
        waiting, running = asyncio.run(main(gate))
    assert [(step.ids, step.finish) for step in waiting] == [([], "abort")]
    assert ends(running) == ["length"] * subject.runner.slots
