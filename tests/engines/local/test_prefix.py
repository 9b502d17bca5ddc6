"""What is computed again and what is not. The fake runner's answers show any mistake in the contents."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.engines.local.kv_cache import common_prefix_length
from dragoman.engines.local.runner import StepRows
from dragoman.engines.local.scheduler import Scheduler
from dragoman.types import Adapters
from tests.engines.local.paged import PagedDesk
from tests.engines.local.scripted import expected
from tests.engines.local.support import Desk, FakeRunner

SYSTEM = list(range(30))


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [([1, 2, 3], [1, 2, 4], 2), ([1, 2], [1, 2, 3], 2), ([], [1], 0), ([1], [2], 0), ([5, 6], [5, 6], 2)],
)
def test_common(a: list[int], b: list[int], length: int) -> None:
    assert common_prefix_length(np.array(a, np.int32), np.array(b, np.int32)) == length


def test_a_conversation_continues_in_its_own_slot() -> None:
    desk = Desk()
    desk.ask(SYSTEM, 4)
    desk.run()
    longer = SYSTEM + expected(SYSTEM, 4) + [1, 2, 3]
    group = desk.ask(longer, 2)
    desk.run()
    # The last id of an answer has not been computed when the answer ends.
    assert desk.cached(group) == len(SYSTEM) + 3
    assert desk.runner.copies == []
    assert desk.ids(group) == expected(longer, 2)


def test_a_short_common_prefix_does_not_destroy_a_long_history() -> None:
    desk = Desk()
    history = [*SYSTEM, *range(50, 80)]
    desk.ask([*history, 1], 1)
    desk.run()
    other = desk.ask([*SYSTEM[:20], 99, 98], 1)
    desk.run()
    assert desk.cached(other) == 20
    again = desk.ask([*history, 2], 1)
    desk.run()
    assert desk.cached(again) == len(history)


def test_a_prefix_is_copied_from_a_sequence_that_runs() -> None:
    desk = Desk()
    desk.ask([*SYSTEM, 1], 20)
    desk.step()
    other = desk.ask([*SYSTEM, 2], 3)
    desk.step()
    assert desk.runner.copies == [(0, 1, len(SYSTEM))]
    desk.run()
    assert desk.cached(other) == len(SYSTEM)
    assert desk.ids(other) == expected([*SYSTEM, 2], 3)


@pytest.mark.parametrize("kind", [Desk, PagedDesk])
def test_a_prefix_that_is_being_computed_is_waited_for(kind: type[Desk]) -> None:
    desk = kind(batch=8)
    groups = [desk.ask([*SYSTEM, n], 2) for n in range(4)]
    desk.run()
    rows = sum(len(step) for step in desk.runner.steps)
    assert rows <= len(SYSTEM) + 4 * 3
    for n, group in enumerate(groups):
        assert desk.ids(group) == expected([*SYSTEM, n], 2)


@pytest.mark.parametrize("kind", [Desk, PagedDesk])
def test_who_cannot_use_a_prefix_does_not_wait_for_it(kind: type[Desk]) -> None:
    desk = kind(batch=8)
    desk.ask([*SYSTEM, 1], 1)
    whole = desk.ask([*SYSTEM, 2], 1, prompt_logprobs=0)
    desk.step()
    assert whole.sequences[0].slot is not None
    desk.run()
    assert desk.cached(whole) == 0


@pytest.mark.parametrize("kind", [Desk, PagedDesk])
def test_others_go_on_while_somebody_waits_for_a_prefix(kind: type[Desk]) -> None:
    desk = kind(batch=8)
    desk.ask([*SYSTEM, 1], 2)
    desk.ask([*SYSTEM, 2], 2)
    other = desk.ask([77], 1)
    desk.step()
    desk.step()
    assert any(slot == 1 for rows in desk.runner.steps for slot in rows.slots)
    desk.run()
    assert desk.ids(other) == expected([77], 1)


@pytest.mark.parametrize("chosen", [(("red", 1.0),), (("red", 0.5),)])
@pytest.mark.parametrize("kind", [Desk, PagedDesk])
def test_nothing_is_shared_across_adapters(kind: type[Desk], chosen: Adapters) -> None:
    desk = kind()
    desk.ask(SYSTEM, 2)
    desk.run()
    group = desk.ask(SYSTEM, 2, adapters=chosen)
    desk.run()
    assert desk.cached(group) == 0
    assert desk.ids(group) == expected(SYSTEM, 2, chosen)


@pytest.mark.parametrize("kind", [Desk, PagedDesk])
def test_a_private_job_leaves_nothing_but_shares_with_itself(kind: type[Desk]) -> None:
    desk = kind(batch=64)
    private = desk.ask(SYSTEM, 2, n=2, reuse_prefix=False)
    desk.run()
    assert sum(len(rows) for rows in desk.runner.steps) < 2 * len(SYSTEM)
    assert desk.ids(private, 1) == expected(SYSTEM, 2)
    after = desk.ask(SYSTEM, 2)
    desk.run()
    assert desk.cached(after) == 0


def test_the_slot_idle_for_longest_is_given_away() -> None:
    desk = Desk(slots=2)
    for first in (1, 2):
        desk.ask([first, *SYSTEM], 1)
        desk.run()
    desk.ask([1, *SYSTEM], 1)
    desk.run()
    desk.ask([3, *SYSTEM], 1)
    desk.run()
    kept, gone = desk.ask([1, *SYSTEM], 1), desk.ask([2, *SYSTEM], 1)
    desk.run()
    assert desk.cached(kept) == len(SYSTEM)
    assert desk.cached(gone) == 0


def test_a_slot_next_to_a_running_one_is_preferred() -> None:
    desk = Desk(slots=8)
    for first in range(8):
        desk.ask([first, 1, 2], 1)
        desk.run()
    # Slot 0 is the stalest, but slot 3 is stale enough and next to the one that runs.
    running = desk.ask([2, 1, 2, 3], 9)
    desk.step()
    assert desk.runner.steps[-1].slots == [2]
    desk.ask([99], 9)
    desk.step()
    assert desk.runner.steps[-1].slots in ([1, 2], [2, 3])
    desk.run()
    assert desk.ids(running) == expected([2, 1, 2, 3], 9)


def test_where_answers_are_computed_otherwise_they_are_read_again() -> None:
    desk = Desk(rereads=True)
    desk.ask(SYSTEM, 20)
    for _ in range(6):
        desk.step()
    longer = SYSTEM + expected(SYSTEM, 20) + [1, 2, 3]
    beside = desk.ask(longer, 2)
    desk.run()
    after = desk.ask(longer[:-1], 2)
    desk.run()
    assert [desk.cached(group) for group in (beside, after)] == [len(SYSTEM), len(longer) - 2]
    assert desk.ids(beside) == expected(longer, 2)
    assert desk.ids(after) == expected(longer[:-1], 2)


class BlockRunner(FakeRunner):
    """It notes which rows of its slots were computed as parts of whole blocks."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.ways: list[list[bool]] = [[] for _ in range(self.slots)]

    def write(self, rows: StepRows, number: int) -> Sequence[int]:
        slot = rows.slots[number]
        assert slot not in rows.in_blocks or rows.slots.count(slot) % self.prefill_block == 0
        self.ways[slot][rows.positions[number] :] = [slot in rows.in_blocks]
        return super().write(rows, number)

    def copy(self, source: int, target: int, length: int) -> None:
        super().copy(source, target, length)
        self.ways[target] = self.ways[source][:length]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=8))
def test_rows_of_a_prompt_go_the_same_ways_whatever_was_known(asked: list[tuple[int, int]]) -> None:
    desk = Desk(block=8, slots=2)
    desk.runner = runner = BlockRunner(block=8, slots=2, rereads=True)
    desk.scheduler = Scheduler(runner, batch=32, chunk=8)
    for size, last in asked:
        prompt = [*range(size - 1), last]
        group = desk.ask(prompt, 3)
        desk.run()
        assert desk.ids(group) == expected(prompt, 3)
        slot = next(slot for slot in (0, 1) if runner.held[slot] == prompt)
        assert runner.ways[slot][:size] == [index < (size - 1) // 8 * 8 for index in range(size)]


@pytest.mark.parametrize(
    ("before", "after", "known"),
    [(20, 23, 20), (20, 30, 16), (30, 20, 16), (24, 30, 16), (24, 24, 23), (5, 7, 5), (5, 9, 0)],
)
def test_what_is_behind_whole_blocks_is_known_to_prompts_with_the_same(
    before: int, after: int, known: int
) -> None:
    desk = Desk(block=8, rereads=True)
    desk.ask([*range(before)], 2)
    desk.run()
    group = desk.ask([*range(after)], 2)
    desk.run()
    assert desk.cached(group) == known


def test_a_runner_that_cannot_rewind_computes_everything() -> None:
    desk = Desk(rewinds=False)
    desk.ask(SYSTEM, 2)
    desk.run()
    group = desk.ask(SYSTEM, 2, n=2)
    desk.run()
    assert desk.cached(group) == 0
    assert desk.ids(group, 1) == expected(SYSTEM, 2)


def test_what_runs_is_brought_together_when_others_end() -> None:
    desk = Desk(slots=4, swaps=True)
    groups = [desk.ask([number, 1, 2], 2 if number == 2 else 9) for number in (1, 2, 3)]
    while len(desk.ids(groups[1])) < 2:
        desk.step()
    desk.step()
    assert desk.runner.steps[-1].slots == [0, 1]
    desk.run()
    assert [desk.ids(group) for group in groups] == [
        expected([number, 1, 2], 2 if number == 2 else 9) for number in (1, 2, 3)
    ]


prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=40)
adapters = st.sampled_from([(), (("red", 1.0),), (("red", 0.5),)])
asks = st.tuples(prompts, st.integers(1, 6), st.integers(1, 3), adapters, st.integers(0, 3))


@settings(max_examples=150, deadline=None)
@given(st.lists(asks, min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 20), st.data())
def test_sharing_never_changes_an_answer(
    wanted: list[tuple[list[int], int, int, Adapters, int]], slots: int, batch: int, data: st.DataObject
) -> None:
    desk = Desk(slots=slots, batch=batch, chunk=max(1, batch // 3), swaps=data.draw(st.booleans()))
    groups = []
    for prompt, count, n, chosen, wait in wanted:
        groups.append(desk.ask(prompt, count, n=n, adapters=chosen))
        for _ in range(wait):
            if desk.scheduler.busy:
                desk.step()
        if data.draw(st.integers(0, 5)) == 0:
            desk.cancel(data.draw(st.sampled_from(groups)), 0)
    desk.run(2000)
    for group in groups:
        for index in range(group.job.n):
            answer = expected(group.job.prompt, group.job.sampling.max_tokens, group.job.adapters)
            got = desk.ids(group, index)
            assert got == answer[: len(got)]
            assert got == answer or desk.finish(group, index) == "abort"
