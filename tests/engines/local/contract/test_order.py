"""Who is computed first where there is not a place for everybody."""

import asyncio
from functools import partial

from tests.engines.local.contract.subject import Gate, Subject, SubmittedJob


def order_of(subject: Subject, priorities: list[int]) -> list[int]:
    """All places but one are taken for good. Who gets that one, of jobs that come in this order?"""

    async def main(gate: Gate) -> list[int]:
        gate.shut()
        taken = SubmittedJob(
            subject.engine, subject.job([9], 150, n=subject.runner.slots - 1, ignore_eos=True)
        )
        await gate.reached()
        begun: list[int] = []
        waiting = []
        for number, priority in enumerate(priorities):
            asked = subject.job([10 + number], 2, priority=priority, ignore_eos=True)
            waiting.append(SubmittedJob(subject.engine, asked, partial(begun.append, number)))
        gate.open()
        for heard in waiting:
            await heard.all()
        taken.handle.cancel()
        await taken.all()
        return begun

    with Gate(subject.runner) as gate:
        return asyncio.run(main(gate))


def test_lower_priority_number_goes_first(subject: Subject) -> None:
    assert order_of(subject, [0, 5, -5]) == [2, 0, 1]


def test_first_come_first_served_within_a_priority(subject: Subject) -> None:
    assert order_of(subject, [0, 0, 0]) == [0, 1, 2]
