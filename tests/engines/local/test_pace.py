"""Prompts are read beside answers in pieces that take no longer than answers may stand still."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.engines.local.runner import StepRows
from dragoman.engines.local.scheduler import ALONE_STEP_S, Scheduler
from tests.engines.local.scripted import expected
from tests.engines.local.support import Desk

PAUSE_S = 0.06
PASS_S, ANSWER_S, ROW_S = 0.018, 0.004, 0.0032
LONG = [1 + n % 90 for n in range(300)]
SLOWER = 1.75
"""By what an encoding slows down the rest."""


class FakePictures:
    """Of pictures what the scheduler looks at."""

    encoding = False
    pause = PAUSE_S


class TimedDesk(Desk):
    """For its runner all takes its time: a step, an answer in it, and a row of a prompt."""

    def __init__(
        self, patch: pytest.MonkeyPatch, costs: tuple[float, float, float] = (PASS_S, ANSWER_S, ROW_S)
    ) -> None:
        super().__init__(slots=8, context=600, rows=512, recalls=3)
        self._pass, self._answer, self._row = costs
        self.seen, self.now = FakePictures(), 0.0
        pictures: Any = self.seen
        self.scheduler = Scheduler(self.runner, batch=512, chunk=128, pictures=pictures, pause=1.0)
        patch.setattr("dragoman.engines.local.scheduler.time.perf_counter", lambda: self.now)
        compute = self.runner.step

        def step(rows: StepRows) -> Any:
            answers = sum(rows.is_answer)
            self.now += self.takes(answers, len(rows) - answers)
            return compute(rows)

        patch.setattr(self.runner, "step", step)

    def takes(self, answers: int, read: int) -> float:
        seconds = self._pass + answers * self._answer + read * self._row
        return seconds * SLOWER if self.seen.encoding else seconds

    def speak(self, answers: int, steps: int, **kinds: Any) -> None:
        for number in range(answers):
            self.ask([number, *LONG[:40]], 500, **kinds)
        for _ in range(steps):
            self.step()

    def timed_step(self) -> tuple[float, int, int]:
        """What a step took, how many answers were in it and how many rows of prompts."""
        before = self.now
        self.step()
        rows = self.runner.steps[-1]
        return self.now - before, sum(rows.is_answer), len(rows) - sum(rows.is_answer)


milliseconds = st.floats(0.2, 5).map(lambda each: each / 1000)
costs = st.tuples(st.floats(1, 100).map(lambda each: each / 1000), milliseconds, milliseconds)


@settings(max_examples=30)
@given(costs, st.integers(1, 4), st.integers(1, 4), st.data())
def test_no_step_with_answers_takes_much_longer_than_they_may_stand_still(
    took: tuple[float, float, float], speakers: int, readers: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        desk = TimedDesk(patch, took)
        desk.speak(speakers, 8)
        asked = [[50 + number, *LONG[: data.draw(st.integers(1, 120))]] for number in range(readers)]
        groups = [desk.ask(prompt, 3) for prompt in asked]
        while not all(desk.ids(group) for group in groups):
            seconds, answers, read = desk.timed_step()
            alone = desk.takes(answers, 0)
            assert seconds <= max(1.25 * PAUSE_S, 1.25 * alone, alone + took[-1])
            assert answers and read
        while any(group.sequences for group in groups):
            desk.step()
        assert [desk.ids(group) for group in groups] == [expected(prompt, 3, recalls=3) for prompt in asked]


def test_where_steps_take_long_by_themselves_prompts_have_a_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = TimedDesk(monkeypatch, (0.8, 0.2, 0.03))
    desk.seen.pause = 60.0
    desk.speak(2, 8)
    desk.ask([50, *LONG], 3)
    took = [desk.timed_step()[0] for _ in range(10)]
    assert 1.3 * desk.takes(2, 0) < min(took) <= max(took) < 1.7 * desk.takes(2, 0)


def test_the_time_that_there_is_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = TimedDesk(monkeypatch)
    desk.speak(4, 20)
    desk.ask([50, *LONG], 3)
    took = [desk.timed_step()[0] for _ in range(20)][5:]
    assert 0.8 * PAUSE_S < min(took) <= max(took) < 1.2 * PAUSE_S


def test_where_nobody_speaks_prompts_are_read_in_large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = TimedDesk(monkeypatch)
    desk.ask(LONG, 3)
    assert desk.timed_step()[1:] == (0, 300)


def test_while_a_picture_is_encoded_less_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = TimedDesk(monkeypatch)
    desk.speak(3, 20)
    desk.ask([50, *LONG], 3)
    for _ in range(5):
        desk.step()
    desk.seen.encoding = True
    took = [desk.timed_step()[0] for _ in range(10)]
    assert max(took) < 1.25 * PAUSE_S
    desk.seen.encoding = False
    assert desk.timed_step()[0] > 0.8 * PAUSE_S


def test_answers_with_other_adapters_wait_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = TimedDesk(monkeypatch)
    desk.speak(3, 6, adapters=(("red", 1.0),))
    desk.ask([50, *LONG], 3)
    took = [desk.timed_step()[0] for _ in range(10)]
    assert max(took) < 1.25 * PAUSE_S


def steps_of_a_prompt(patch: pytest.MonkeyPatch, *, interruptible: bool, quiet: bool = False) -> list[int]:
    """Rows of the steps in which a prompt is read beside which nothing is to be done."""
    desk = TimedDesk(patch)
    desk.runner.interruptible = interruptible
    desk.speak(1, 3)
    desk.run(600)
    group = desk.ask(LONG, 1)
    group.is_idle_prefill = quiet
    begun = len(desk.runner.steps)
    desk.run()
    return [len(rows) for rows in desk.runner.steps[begun:]]


def test_steps_that_cannot_be_interrupted_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that comes waits for the running step, also where the client before it has left."""
    rows = steps_of_a_prompt(monkeypatch, interruptible=False)
    assert len(rows) > 2
    assert max(rows) * ROW_S <= 1.2 * ALONE_STEP_S
    assert min(rows[:-1]) >= 64, "weights are not read for a few rows"


def test_steps_that_can_be_interrupted_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(steps_of_a_prompt(monkeypatch, interruptible=True)) == 1


def test_steps_that_no_client_waits_for_are_the_shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = steps_of_a_prompt(monkeypatch, interruptible=False, quiet=True)
    assert max(rows) <= 16
