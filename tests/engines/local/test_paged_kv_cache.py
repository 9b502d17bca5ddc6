"""Pages: what is shared, what is copied, who steps back. The fake runner's answers show any mistake."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.engines.local.paged_kv_cache import KVPagePool, root_of
from dragoman.types import Adapters
from tests.engines.local.paged import PagedDesk
from tests.engines.local.scripted import expected

SYSTEM = list(range(30))


def ids(*tokens: int) -> "np.typing.NDArray[np.int32]":
    return np.array(tokens, np.int32)


def rows(desk: PagedDesk) -> int:
    return sum(len(step) for step in desk.runner.steps)


def test_one_owners_flood_does_not_drive_out_what_another_has() -> None:
    desk = PagedDesk(slots=2, pages=16, page=4)
    prompt = list(range(1, 14))
    desk.ask(prompt, 2, owner="drop")
    desk.run()
    for n in range(20):
        desk.ask([50 + n, *prompt], 2, owner="flood")
        desk.run()
    again = desk.ask(prompt, 2, owner="drop")
    desk.run()
    assert desk.cached(again) == 12


def test_many_conversations_outlive_their_slots() -> None:
    desk = PagedDesk(slots=1, pages=200)
    for first in range(20):
        desk.ask([first, *SYSTEM], 1)
        desk.run()
    again = desk.ask([0, *SYSTEM], 1)
    desk.run()
    assert desk.cached(again) == len(SYSTEM)


def test_continuations_share_their_prompt_and_copy_one_page_each() -> None:
    desk = PagedDesk(batch=64)
    group = desk.ask(SYSTEM, 3, n=4)
    desk.run()
    assert rows(desk) == len(SYSTEM) + 3 + 4 * 2
    assert len(desk.runner.copies) == 3
    assert [desk.ids(group, index) for index in range(4)] == [expected(SYSTEM, 3)] * 4


def test_what_was_left_first_goes_first() -> None:
    desk = PagedDesk(slots=1, context=32, pages=8, page=4)
    old, new = [1, *range(50, 65)], [2, *range(50, 65)]
    for prompt in (old, new):
        desk.ask(prompt, 1)
        desk.run()
    desk.ask([3, *range(50, 61)], 1)
    desk.run()
    kept, gone = desk.ask(new, 1), desk.ask(old, 1)
    desk.run()
    assert desk.cached(kept) == len(new) - 1
    assert (desk.cached(gone) or 0) < len(old) // 2


def test_who_came_last_steps_back_when_memory_runs_out() -> None:
    desk = PagedDesk(slots=3, context=40, pages=12, page=4)
    groups = [desk.ask([first, 1, 2], 30) for first in (10, 11, 12)]
    desk.run(400)
    assert [desk.ids(group) for group in groups] == [expected([first, 1, 2], 30) for first in (10, 11, 12)]
    assert [desk.finish(group) for group in groups] == ["length"] * 3


def test_a_prompt_waits_until_there_is_room_for_it() -> None:
    desk = PagedDesk(slots=2, context=40, pages=10, page=4)
    desk.ask([1] * 24, 8)
    second = desk.ask([2] * 24, 2)
    desk.step()
    assert second.sequences[0].slot is None
    desk.run()
    assert desk.ids(second) == expected([2] * 24, 2)


def test_who_waits_for_room_is_not_overtaken() -> None:
    desk = PagedDesk(slots=3, context=40, pages=10, page=4)
    desk.ask([1] * 24, 8)
    second = desk.ask([2] * 24, 1)
    third = desk.ask([3], 1)
    desk.run()
    groups = [group for group, _ in desk.said]
    assert groups.index(second) < groups.index(third)


def test_prompt_log_probabilities_survive_a_step_back() -> None:
    desk = PagedDesk(slots=3, context=40, pages=12, page=4, rows=64)
    groups = [desk.ask([first, 1, 2], 30, prompt_logprobs=0) for first in (10, 11, 12)]
    desk.run(400)
    for group in groups:
        logprobs = desk.steps_of(group)[0].prompt_logprobs
        assert logprobs is not None and len(logprobs) == 3


def test_a_page_in_use_is_never_given_away() -> None:
    store = KVPagePool(2, 4)
    first, second = store.take(), store.take()
    assert first is not None and second is not None
    store.register(first, root_of(()), ids(1, 2, 3, 4))
    assert store.take() is None
    store.use(first)
    store.leave(first)
    assert store.take() is None
    store.leave(first)
    assert store.find(root_of(()), ids(1, 2, 3, 4)).pages == [first]
    assert store.take() == first
    assert store.find(root_of(()), ids(1, 2, 3, 4)).pages == []


def test_equal_pages_after_different_ones_are_different() -> None:
    store = KVPagePool(4, 2)
    chain = root_of(())
    for tokens in (ids(1, 2), ids(7, 8)):
        page = store.take()
        assert page is not None
        chain = store.register(page, chain, tokens)
    assert len(store.find(root_of(()), ids(1, 2, 7, 8)).pages) == 2
    assert store.find(root_of(()), ids(7, 8)).pages == []


prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=30)
adapters = st.sampled_from([(), (("red", 1.0),)])
asks = st.tuples(prompts, st.integers(1, 30), st.integers(1, 3), adapters, st.integers(0, 3))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(asks, min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(10, 40),
    st.integers(1, 5),
    st.data(),
)
def test_sharing_guessing_and_stepping_back_never_change_an_answer(
    wanted: list[tuple[list[int], int, int, Adapters, int]],
    slots: int,
    pages: int,
    page: int,
    data: st.DataObject,
) -> None:
    context = min(64, pages * page)
    recalls = data.draw(st.sampled_from([1, 2, None]))
    desk = PagedDesk(
        slots=slots,
        context=context,
        pages=pages,
        page=page,
        batch=data.draw(st.integers(1, 20)),
        guesses=data.draw(st.integers(0, 7)),
        pass_rows=16,
        recalls=recalls,
    )
    desk.runner.batches_adapters = data.draw(st.booleans())
    groups = []
    for prompt, count, n, chosen, wait in wanted:
        groups.append(desk.ask(prompt[: context - 1], count, n=n, adapters=chosen))
        for _ in range(wait):
            if desk.scheduler.busy:
                desk.step()
        if data.draw(st.integers(0, 5)) == 0:
            desk.cancel(data.draw(st.sampled_from(groups)), 0)
    desk.run(4000)
    for group in groups:
        room = context - len(group.job.prompt)
        count = min(group.job.sampling.max_tokens, room)
        answer = expected(group.job.prompt, count, group.job.adapters, recalls)
        for index in range(group.job.n):
            got = desk.ids(group, index)
            assert got == answer[: len(got)]
            assert got == answer or desk.finish(group, index) == "abort"
