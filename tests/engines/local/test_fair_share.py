"""Owners have equal shares of what is computed, whatever one of them asks."""

from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.local.fair_share import TURN
from dragoman.engines.protocol import BACKGROUND_PRIORITY
from tests.engines.local.paged import PagedDesk
from tests.engines.local.scripted import expected
from tests.engines.local.support import Desk

KINDS = pytest.mark.parametrize("kind", [Desk, PagedDesk])
LONG = list(range(1, 41))


@KINDS
def test_who_comes_later_does_not_wait_for_the_long_answers_of_another(kind: type[Desk]) -> None:
    desk = kind(slots=4)
    flood = [desk.ask([n, 2], 30, owner="flood", priority=-9) for n in range(8)]
    desk.step()
    desk.step()
    drop = desk.ask([50, 51, 52], 3, owner="drop")
    desk.step()
    assert desk.ids(drop) == expected([50, 51, 52], 1)
    desk.run()
    assert desk.ids(drop) == expected([50, 51, 52], 3)
    for n, group in enumerate(flood):
        assert desk.ids(group) == expected([n, 2], 30)


@KINDS
def test_slots_are_shared_out_equally_and_nobody_is_pushed_back_and_forth(kind: type[Desk]) -> None:
    desk = kind(slots=4)
    for owner in ("first", "second"):
        for n in range(8):
            desk.ask([n, 2], 12, owner=owner)
        desk.step()
    desk.said.clear()
    for _ in range(8):
        desk.step()
    texts = [group.job.owner for group, step in desk.said if step.ids]
    assert (texts.count("first"), texts.count("second")) == (16, 16)


@KINDS
def test_where_there_are_fewer_slots_than_owners_they_take_turns(kind: type[Desk]) -> None:
    desk = kind(slots=1, context=256, **({"pages": 128} if kind is PagedDesk else {}))
    flood = desk.ask([1, 2], 3 * TURN, owner="flood")
    desk.step()
    drop = desk.ask([3, 4], 2, owner="drop")
    for _ in range(TURN + 2):
        desk.step()
    assert desk.ids(drop) == expected([3, 4], 2)
    desk.run(1000)
    assert desk.ids(flood) == expected([1, 2], 3 * TURN)


@KINDS
def test_what_is_read_of_prompts_is_shared_out_equally(kind: type[Desk]) -> None:
    desk = kind(slots=4, chunk=8, batch=8)
    for n in range(3):
        desk.ask([n, *LONG], 2, owner="flood", priority=-9)
    drop = desk.ask(LONG[:8], 2, owner="drop")
    desk.step()
    desk.step()
    assert desk.ids(drop) == expected(LONG[:8], 1)


@KINDS
def test_steps_are_shared_out_equally_however_many_adapters_one_owner_has(kind: type[Desk]) -> None:
    desk = kind(slots=5)
    for n in range(4):
        desk.ask([n], 20, owner="flood", adapters=(("red", 1 / (n + 1)),))
    drop = desk.ask([9], 4, owner="drop")
    for _ in range(8):
        desk.step()
    assert desk.ids(drop) == expected([9], 4)


def test_where_memory_runs_out_the_owner_with_the_most_steps_back() -> None:
    desk = PagedDesk(slots=4, pages=12)
    flood = [desk.ask([n, 2, 3], 16, owner="flood", priority=-9) for n in range(3)]
    drop = desk.ask([9, 9, 9], 16, owner="drop")
    steps = 0
    while desk.steps_of(drop)[-1:] == [] or desk.finish(drop) is None:
        desk.step()
        steps += 1
    assert steps <= 18
    desk.run(1000)
    for n, group in enumerate(flood):
        assert desk.ids(group) == expected([n, 2, 3], 16)


Wish: TypeAlias = tuple[int, int, int]
FLOOD = st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 9), st.integers(1, 12)), max_size=6)


@given(st.sampled_from([Desk, PagedDesk]), st.integers(2, 5), FLOOD, FLOOD, st.integers(0, 9))
def test_whatever_one_owner_asks_the_next_of_another_begins_at_once(
    kind: type[Desk],
    slots: int,
    before: list[tuple[int, int, int]],
    after: list[tuple[int, int, int]],
    late: int,
) -> None:
    desk = kind(slots=slots)
    asked = [(desk.ask([p + 20, n], most, n=n, priority=p, owner="flood"), most) for p, n, most in before]
    for _ in range(late):
        desk.step()
    drop = desk.ask([50, 51], 2, owner="drop", priority=9)
    asked += [(desk.ask([p + 20, n], most, n=n, priority=p, owner="flood"), most) for p, n, most in after]
    desk.step()
    desk.step()
    assert desk.ids(drop) == expected([50, 51], 2)
    desk.run(2000)
    for group, most in asked:
        for index in range(group.job.n):
            assert desk.ids(group, index) == expected(group.job.prompt, most)


@KINDS
def test_beside_who_only_decodes_prompts_are_read_in_half_of_the_time(kind: type[Desk]) -> None:
    desk = kind(slots=8, chunk=8, context=200, rows=256, **({"pages": 400} if kind is PagedDesk else {}))
    drop = desk.ask([1, 2], 60, owner="drop")
    desk.step()
    clock = 0.0
    for n in range(3):
        desk.ask([n + 10, *LONG, *LONG, *LONG], 2, owner="flood")
    sizes = []
    with pytest.MonkeyPatch.context() as patch:

        def now() -> float:
            return clock

        patch.setattr("dragoman.engines.local.scheduler.time.perf_counter", now)
        step = desk.runner.step

        def slow(rows: Any) -> Any:
            """As long as it has rows."""
            nonlocal clock
            clock += len(rows)
            sizes.append(len(rows))
            return step(rows)

        patch.setattr(desk.runner, "step", slow)
        for _ in range(30):
            desk.step()
    read = sum(size - 1 for size in sizes)
    assert 0.3 < read / sum(sizes) < 0.6
    desk.run(2000)
    assert desk.ids(drop) == expected([1, 2], 60)


@KINDS
def test_where_several_come_and_go_no_step_is_long(kind: type[Desk]) -> None:
    desk = kind(batch=32, chunk=8)
    desk.ask([1], 1, owner="drop")
    desk.run()
    desk.ask(LONG, 2, owner="flood")
    desk.step()
    assert len(desk.runner.steps[-1]) == 8


@KINDS
@pytest.mark.parametrize("owner", ["", "key"])
def test_what_nobody_waits_for_delays_nobody_by_more_than_a_step(kind: type[Desk], owner: str) -> None:
    desk = kind(slots=4)
    lines = [desk.ask([n, 2], 30, owner=owner, priority=BACKGROUND_PRIORITY + n) for n in range(8)]
    desk.step()
    desk.step()
    chats = [desk.ask([50 + n, 51], 3, owner=owner) for n in range(4)]
    desk.step()
    assert [desk.ids(chat) for chat in chats] == [expected([50 + n, 51], 1) for n in range(4)]
    desk.run()
    for n, group in enumerate(lines):
        assert desk.ids(group) == expected([n, 2], 30)


@KINDS
def test_what_nobody_waits_for_has_what_is_left(kind: type[Desk]) -> None:
    desk = kind(slots=4)
    for n in range(3):
        desk.ask([n, 2], 12, owner="key")
    for n in range(8):
        desk.ask([10 + n, 2], 12, owner="other", priority=BACKGROUND_PRIORITY)
    for _ in range(6):
        desk.step()
    items = [group.job.priority >= BACKGROUND_PRIORITY for group, step in desk.said if step.ids]
    # The prompt was read after all others.
    assert (items.count(False), items.count(True)) == (18, 5)


@KINDS
def test_a_long_prompt_that_nobody_waits_for_is_read_after_another_s(kind: type[Desk]) -> None:
    desk = kind(slots=4, chunk=8, batch=8)
    desk.ask([1, *LONG], 2, owner="key", priority=BACKGROUND_PRIORITY)
    desk.step()
    chat = desk.ask(LONG[:8], 2, owner="key")
    desk.step()
    assert desk.ids(chat) == expected(LONG[:8], 1)
