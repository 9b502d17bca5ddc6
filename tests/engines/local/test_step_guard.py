"""Steps that fail: only the answer that cannot be computed ends with an error, and the engine goes on."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from dragoman.engines.local import step_guard
from dragoman.engines.local.runner import StepRows
from dragoman.engines.sampling import Logits
from dragoman.errors import EngineFailed
from tests.engines.local.paged import FlyingDesk, PagedDesk
from tests.engines.local.scripted import END, engine_over, expected
from tests.engines.local.support import Desk, FakeRunner, job

SIZES: dict[str, Any] = {"slots": 4, "context": 64, "rows": 64}
PROMPTS = [[n, n + 1, n + 2] for n in range(1, 30, 7)]
POISON = END
"""A token that no step can compute, and no answer has."""
Fault = Callable[[StepRows], bool]


@pytest.fixture(params=[Desk, PagedDesk, FlyingDesk])
def kind(request: pytest.FixtureRequest) -> type[Desk]:
    desk: type[Desk] = request.param
    return desk


def fail_where(desk: Desk, fault: Fault, error: Exception | None = None) -> None:
    """Steps for which `fault` holds are computed, and then raise."""
    step = desk.runner.step

    def failing(rows: StepRows) -> Logits:
        logits = step(rows)
        if fault(rows):
            raise error or RuntimeError("Eltwise shape infer: dim index 0 mismatch")
        return logits

    desk.runner.step = failing  # type: ignore[method-assign]


def spoil_where(desk: Desk, fault: Fault) -> None:
    """Logits of slots whose rows hold the token of `fault` are not numbers."""
    step = desk.runner.step

    def spoiling(rows: StepRows) -> Logits:
        bad = {slot for slot, token in zip(rows.slots, rows.tokens, strict=True) if fault_of(token)}
        logits = step(rows)
        wanted = [slot for slot, output in zip(rows.slots, rows.outputs, strict=True) if output]
        for row, slot in enumerate(wanted):
            if slot in bad:
                logits[row, 3] = np.nan
        return logits

    def fault_of(token: int) -> bool:
        rows = StepRows()
        rows.add(0, 0, token)
        return fault(rows)

    desk.runner.step = spoiling  # type: ignore[method-assign]


def has_poison(rows: StepRows) -> bool:
    return POISON in rows.tokens


def once(fault: Fault) -> Fault:
    left = [1]

    def only_once(rows: StepRows) -> bool:
        return fault(rows) and bool(left) and left.pop() == 1

    return only_once


@pytest.mark.parametrize("error", [RuntimeError("reshape"), ValueError("stale output"), OSError(5, "I/O")])
def test_no_client_hears_of_a_step_that_fails_once(kind: type[Desk], error: Exception) -> None:
    desk = kind(**SIZES)
    steps = iter(range(100))
    fail_where(desk, lambda rows: next(steps) == 3, error)
    groups = [desk.ask(prompt, 6) for prompt in PROMPTS]
    desk.run()
    assert [desk.ids(group) for group in groups] == [expected(prompt, 6) for prompt in PROMPTS]
    assert desk.scheduler.faults.failed_steps == 1
    assert (desk.runner.resets, desk.runner.rebuilds) == (1, 0)


def test_only_the_answer_that_cannot_be_computed_ends(kind: type[Desk]) -> None:
    desk = kind(**SIZES)
    fail_where(desk, has_poison)
    good = [desk.ask(prompt, 6) for prompt in PROMPTS[:2]]
    bad = desk.ask([1, 2, POISON, 4], 6)
    good += [desk.ask(prompt, 6) for prompt in PROMPTS[2:]]
    desk.run()
    assert desk.finish(bad) == "error"
    assert isinstance(desk.steps_of(bad)[-1].error, EngineFailed)
    assert [desk.ids(group) for group in good] == [expected(prompt, 6) for prompt in PROMPTS]
    assert desk.runner.rebuilds == 1


def test_only_the_answer_whose_logits_are_not_numbers_ends() -> None:
    for kind in (Desk, PagedDesk):
        desk = kind(**SIZES)
        spoil_where(desk, has_poison)
        good = [desk.ask(prompt, 6) for prompt in PROMPTS]
        bad = desk.ask([1, POISON], 6)
        desk.run()
        assert desk.finish(bad) == "error"
        assert [desk.ids(group) for group in good] == [expected(prompt, 6) for prompt in PROMPTS]
        assert desk.runner.rebuilds == 0, "one request must not stop the others"


def test_a_row_that_is_no_number_once_is_computed_again() -> None:
    for kind in (Desk, PagedDesk):
        desk = kind(**SIZES)
        spoil_where(desk, once(has_poison))
        group = desk.ask([1, POISON], 6)
        desk.run()
        assert desk.ids(group) == expected([1, POISON], 6)


def test_answers_without_numbers_one_after_the_other_rebuild_the_runner() -> None:
    desk = PagedDesk(**SIZES)
    spoil_where(desk, lambda rows: True)
    groups = [desk.ask(prompt, 2) for prompt in PROMPTS[:3]]
    desk.run()
    assert {desk.finish(group) for group in groups} == {"error"}
    assert desk.runner.rebuilds == 1


def test_what_was_spoiled_is_not_found_again_as_a_prefix() -> None:
    desk = PagedDesk(**SIZES)
    prompt = [*range(20), POISON, *range(20)]
    spoil_where(desk, once(lambda rows: rows.tokens[-1] == 19))
    first = desk.ask(prompt, 3)
    desk.run()
    assert desk.ids(first) == expected(prompt, 3)


def test_a_fourth_rebuild_within_a_minute_is_the_end() -> None:
    desk = PagedDesk(**SIZES)
    fail_where(desk, lambda rows: True)
    for number in range(9):
        desk.ask([number], 3)
    with pytest.raises(EngineFailed, match="rebuilds within a minute"):
        desk.run()
    assert desk.runner.rebuilds == step_guard.MOST_REBUILDS


def test_rebuilds_of_an_hour_are_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**6, 61))
    monkeypatch.setattr("dragoman.engines.local.step_guard.time.monotonic", lambda: next(clock))
    desk = PagedDesk(**SIZES)
    fail_where(desk, has_poison)
    groups = [desk.ask([POISON], 3) for _ in range(6)]
    desk.run()
    assert {desk.finish(group) for group in groups} == {"error"}
    assert desk.runner.rebuilds == 6


def test_the_log_has_the_librarys_words_once_a_minute_and_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    desk = PagedDesk(**SIZES)
    fail_where(desk, has_poison)
    for number in range(3):
        desk.ask([number, POISON, 55, 56], 3)
    desk.run()
    messages = [record.getMessage() for record in caplog.records if "dim index 0" in record.getMessage()]
    assert len([line for line in messages if "Rebuilding" not in line]) == 1
    assert not any("56" in line for line in messages)


def test_an_engine_that_fails_for_good_says_why_to_its_check() -> None:
    async def main() -> str:
        runner = FakeRunner(**SIZES)
        engine = engine_over(runner)
        runner.step = lambda rows: 1 // 0  # type: ignore[method-assign, assignment, return-value]
        for _ in range(2 * step_guard.MOST_REBUILDS):
            with pytest.raises(EngineFailed) as failed:
                [step async for step in engine.generate(job([2], 3))]
        with pytest.raises(EngineFailed) as failed:
            await engine.check()
        engine.close()
        return str(failed.value)

    assert "rebuilds within a minute" in asyncio.run(main())


def test_an_embedding_is_tried_twice() -> None:
    async def main() -> list[list[float]]:
        runner = FakeRunner(**SIZES)
        engine = engine_over(runner)
        embed, failures = runner.embed, [RuntimeError("once")]

        def failing(prompts: Any) -> Any:
            if failures:
                raise failures.pop()
            yield from embed(prompts)

        runner.embed = failing  # type: ignore[method-assign]
        vectors = await engine.embed([[1, 2]])
        engine.close()
        return vectors

    assert len(asyncio.run(main())) == 1


@given(
    failing=st.sets(st.integers(0, 40), max_size=8),
    prompts=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20), min_size=1, max_size=6),
    number=st.integers(0, 1),
)
def test_whatever_fails_once_changes_no_answer(
    failing: set[int], prompts: list[list[int]], number: int
) -> None:
    """Steps fail at random; where no two failures follow each other, all answers are as without them."""
    desk = (Desk, PagedDesk)[number](**SIZES)
    steps, failed = [0], [-9]

    def fault(rows: StepRows) -> bool:
        steps[0] += 1
        if steps[0] in failing and steps[0] - failed[0] > 30:
            failed[0] = steps[0]
            return True
        return False

    fail_where(desk, fault)
    groups = [desk.ask(prompt, 5) for prompt in prompts]
    desk.run()
    event(f"failed: {failed[0] > 0}")
    for group, prompt in zip(groups, prompts, strict=True):
        assert desk.ids(group) == expected(prompt, 5)
