"""The scheduler, step by step, over runners whose answers depend on every id they were given."""

import pytest

from dragoman.types import Adapters
from tests.engines.local.paged import PagedDesk
from tests.engines.local.scripted import expected
from tests.engines.local.support import Desk

LONG = list(range(1, 41))


@pytest.fixture(params=[Desk, PagedDesk])
def kind(request: pytest.FixtureRequest) -> type[Desk]:
    desk: type[Desk] = request.param
    return desk


def test_each_step_brings_one_id_to_everyone(kind: type[Desk]) -> None:
    desk = kind()
    groups = [desk.ask([n, 2, 3], 5) for n in range(4)]
    desk.run()
    assert len(desk.runner.steps) == 5
    for n, group in enumerate(groups):
        assert desk.ids(group) == expected([n, 2, 3], 5)


def test_a_job_joins_while_another_runs(kind: type[Desk]) -> None:
    desk = kind()
    first = desk.ask([1], 8)
    desk.step()
    second = desk.ask([2], 3)
    desk.step()
    assert desk.runner.steps[-1].slots == [0, 1]
    desk.run()
    assert desk.ids(first) == expected([1], 8)
    assert desk.ids(second) == expected([2], 3)


def test_a_long_prompt_is_read_in_pieces_while_others_decode(kind: type[Desk]) -> None:
    desk = kind(chunk=8)
    short = desk.ask([1], 10)
    desk.step()
    long = desk.ask(LONG, 2)
    desk.step()
    assert len(desk.runner.steps[-1]) == 1 + 8
    assert len(desk.ids(short)) == 2
    desk.run()
    assert desk.ids(long) == expected(LONG, 2)
    assert desk.ids(short) == expected([1], 10)


def test_alone_a_prompt_takes_the_whole_batch(kind: type[Desk]) -> None:
    desk = kind(batch=32, chunk=8)
    desk.ask(LONG, 2)
    desk.step()
    assert len(desk.runner.steps[-1]) == 32


def test_rows_are_in_the_order_of_slots(kind: type[Desk]) -> None:
    desk = kind(slots=4)
    for n in range(4):
        desk.ask([n, 9, 9], 3 + n, priority=-n)
    desk.run()
    for rows in desk.runner.steps:
        assert rows.slots == sorted(rows.slots)


def test_cancel_frees_the_slot_at_once(kind: type[Desk]) -> None:
    desk = kind(slots=1)
    first = desk.ask([1], 50)
    second = desk.ask([2], 2)
    desk.step()
    desk.cancel(first)
    assert desk.finish(first) == "abort"
    desk.run()
    assert desk.ids(second) == expected([2], 2)


def test_a_step_that_fails_in_the_middle_of_a_prompt_leaves_nothing_wrong_behind(kind: type[Desk]) -> None:
    desk = kind(batch=8)
    first = desk.ask(LONG, 2)
    desk.step()
    desk.runner.failing = True
    desk.step()
    desk.runner.failing = False
    desk.run()
    assert desk.ids(first) == expected(LONG, 2)
    group = desk.ask(LONG, 3)
    desk.run()
    assert desk.ids(group) == expected(LONG, 3)


def test_end_all(kind: type[Desk]) -> None:
    desk = kind(slots=1)
    groups = [desk.ask([n], 9) for n in range(3)]
    desk.step()
    desk.scheduler.end_all("abort")
    desk.said += desk.scheduler.take()
    assert [desk.finish(group) for group in groups] == ["abort"] * 3
    assert not desk.scheduler.busy


def test_adapters_are_never_mixed_in_a_step_and_take_turns(kind: type[Desk]) -> None:
    desk = kind(slots=5)
    red, blue, both = ("red", 1.0), ("blue", 1.0), (("blue", 0.5), ("red", 1.0))
    kinds: list[Adapters] = [(), (red,), (blue,), (red,), both]
    groups = [desk.ask([7, 8], 4, adapters=adapters) for adapters in kinds]
    desk.run()
    for adapters, group in zip(kinds, groups, strict=True):
        assert desk.ids(group) == expected([7, 8], 4, adapters)
    first_half = desk.runner.step_adapters[:8]
    assert [first_half.count(adapters) for adapters in ((), (red,), (blue,), both)] == [2, 2, 2, 2]


def test_adapters_share_a_step_where_the_runner_mixes_them() -> None:
    desk = PagedDesk(slots=3)
    desk.runner.batches_adapters = True
    kinds: list[Adapters] = [(), (("red", 1.0),), (("blue", 0.5),)]
    groups = [desk.ask([7, 8], 4, adapters=adapters) for adapters in kinds]
    for _ in range(4):
        desk.step()
    assert [desk.ids(group) for group in groups] == [expected([7, 8], 4, adapters) for adapters in kinds]


@pytest.mark.parametrize("how", [{}, {"rewinds": False}, {"pages": 64}])
def test_many_jobs_one_after_the_other(how: dict[str, int]) -> None:
    desk = (PagedDesk if "pages" in how else Desk)(slots=3, **how)
    prompts = [[*LONG[: 5 + 3 * n], n] for n in range(8)]
    groups = [desk.ask(prompt, 4, n=1 + n % 3) for n, prompt in enumerate(prompts)]
    desk.run()
    for prompt, group in zip(prompts, groups, strict=True):
        for index in range(group.job.n):
            assert desk.ids(group, index) == expected(prompt, 4)
