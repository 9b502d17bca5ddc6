"""An engine is stopped while it works."""

import asyncio

import pytest

from dragoman.errors import Unavailable
from dragoman.types import Step
from tests.engines.local.contract.subject import Gate, Subject, SubmittedJob, ends
from tests.support.wait import becomes


def test_stop_ends_all_jobs_with_abort_and_there_is_no_second_start(mortal: Subject) -> None:
    engine = mortal.engine
    more_than_there_are_places = range(mortal.runner.slots + 2)

    async def stopped() -> list[list[Step]]:
        with Gate(mortal.runner) as gate:
            gate.shut()
            heard = [
                SubmittedJob(engine, mortal.job([n], 150, ignore_eos=True))
                for n in more_than_there_are_places
            ]
            await gate.reached()
            stopping = asyncio.create_task(engine.stop())
            await asyncio.to_thread(becomes, lambda: engine._worker.failure is not None)
            gate.open()
            await stopping
        return [await each.all() for each in heard]

    async def main() -> None:
        for steps in await stopped():
            assert ends(steps) == ["abort"]
        with pytest.raises(Unavailable):
            engine.submit(mortal.job([1]), lambda step: None)
        with pytest.raises(Unavailable):
            await engine.embed([[1]])
        with pytest.raises(Unavailable):
            await engine.check()
        await engine.stop()

    asyncio.run(main())
