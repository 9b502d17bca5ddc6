"""Steps that are begun before the ids of the one before are known: nothing of what is said changes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.local.sequence import Group
from tests.engines.local.paged import FlyingDesk, PagedDesk
from tests.engines.local.scripted import expected
from tests.engines.local.support import Desk

SIZES: dict[str, Any] = {"slots": 3, "context": 64, "pages": 24, "rows": 128}


def told(desk: Desk, groups: list[Group]) -> list[list[tuple[list[int], str | None]]]:
    return [
        [(desk.ids(group, index), desk.finish(group, index)) for index in range(group.job.n)]
        for group in groups
    ]


def test_the_next_step_is_begun_before_anybody_has_seen_an_id() -> None:
    desk = FlyingDesk(**SIZES)
    groups = [desk.ask([place, 2, 3], 8) for place in range(3)]
    desk.run()
    assert [desk.ids(group) for group in groups] == [expected([place, 2, 3], 8) for place in range(3)]
    assert desk.runner.most_unseen == 2


def test_rules_are_asked_when_all_ids_are_known() -> None:
    kinds: dict[str, Any] = {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    desk, other = FlyingDesk(**SIZES), PagedDesk(**SIZES)
    pair = [each.ask([1, 2, 3], 12, **kinds) for each in (desk, other)]
    for each in (desk, other):
        each.run()
    assert desk.ids(pair[0]) == other.ids(pair[1])
    assert desk.runner.most_unseen == 1


def test_one_that_ends_unexpectedly_is_left_out_of_what_was_begun() -> None:
    desk = FlyingDesk(**SIZES)
    answer = expected([5, 6], 9)
    short, long = desk.ask([5, 6], 9, stop_token_ids=frozenset({answer[3]})), desk.ask([7, 8], 9)
    desk.run()
    assert desk.ids(short) == answer[: answer.index(answer[3]) + 1]
    assert desk.ids(long) == expected([7, 8], 9)


def test_what_is_settled_is_read_and_nothing_is_under_way() -> None:
    desk = FlyingDesk(**SIZES)
    group = desk.ask([1, 2], 6)
    for _ in range(3):
        desk.step()
    desk.scheduler.settle()
    desk.said += desk.scheduler.take()
    assert desk.runner.unseen == 0
    assert desk.ids(group) == expected([1, 2], 6)[: len(desk.ids(group))]
    desk.run()
    assert desk.ids(group) == expected([1, 2], 6)


def test_new_weights_are_not_mixed_with_what_was_begun() -> None:
    desk = FlyingDesk(**SIZES)
    group = desk.ask([1, 2], 6)
    for _ in range(3):
        desk.step()
    desk.scheduler.start_over()
    desk.scheduler.weight_version = "new"
    desk.run()
    versions = [step.weight_version for step in desk.steps_of(group)]
    assert versions == sorted(versions, key=lambda version: version or "")
    assert desk.ids(group) == expected([1, 2], 6)


def test_a_step_that_fails_ends_those_in_it_once() -> None:
    desk = FlyingDesk(**SIZES)
    group = desk.ask([1, 2], 9)
    for _ in range(3):
        desk.step()
    desk.runner.failing = True
    desk.run()
    assert [step.finish for step in desk.steps_of(group)].count("error") == 1
    assert desk.finish(group) == "error"


jobs = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(0, 99), min_size=1, max_size=20),
            "count": st.integers(1, 20),
            "n": st.integers(1, 2),
            "temperature": st.sampled_from([0.0, 3.0]),
            "seed": st.integers(0, 9),
            "frequency_penalty": st.sampled_from([0.0, 0.0, 0.5]),
            "typical_p": st.sampled_from([1.0, 1.0, 0.5]),
            "stop_token_ids": st.frozensets(st.integers(0, 99), max_size=30),
            "comes": st.integers(0, 6),
            "goes": st.none() | st.integers(1, 12),
        }
    ),
    min_size=1,
    max_size=5,
)


def run(desk: Desk, asked: list[dict[str, Any]]) -> list[Group]:
    """Jobs come and go at the steps they name."""
    groups: dict[int, Group] = {}
    for moment in range(200):
        for number, one in enumerate(asked):
            if one["comes"] == moment:
                kinds = {key: value for key, value in one.items() if key not in ("comes", "goes")}
                groups[number] = desk.ask(**kinds)
            if one["goes"] is not None and moment == one["comes"] + one["goes"]:
                desk.cancel(groups[number])
        if not desk.scheduler.busy and moment > 20:
            break
        desk.step()
    return [groups[number] for number in range(len(asked))]


@given(jobs, st.sampled_from([24, 17]))
@pytest.mark.thorough
def test_answers_are_those_of_steps_one_by_one(asked: list[dict[str, Any]], pages: int) -> None:
    """Of who is cancelled, as far as they go: it may be heard of one step later."""
    flying, plain = (kind(**SIZES | {"pages": pages}) for kind in (FlyingDesk, PagedDesk))
    ours, theirs = (told(desk, run(desk, asked)) for desk in (flying, plain))
    for one, mine, other in zip(asked, ours, theirs, strict=True):
        if one["goes"] is None:
            assert mine == other
        for (ids, _), (known, _) in zip(mine, other, strict=True):
            assert ids[: len(known)] == known[: len(ids)]
    assert isinstance(flying, FlyingDesk) and flying.runner.unseen <= 1
