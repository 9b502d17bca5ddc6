"""Steps that are begun before the ids of the one before are known: nothing of what is said changes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.local.sequence import SequenceGroup
from tests.engines.local.paged import FlyingDesk, PagedDesk
from tests.engines.local.scripted import expected
from tests.engines.local.support import Desk
from tests.engines.local.test_speculation import START, DictatedConstraint

SIZES: dict[str, Any] = {"slots": 3, "context": 64, "pages": 24, "rows": 128}


def told(desk: Desk, groups: list[SequenceGroup]) -> list[list[tuple[list[int], str | None]]]:
    return [
        [(desk.ids(group, index), desk.finish(group, index)) for index in range(group.job.n)]
        for group in groups
    ]


def test_the_next_step_is_begun_before_anybody_has_seen_an_id() -> None:
    desk = FlyingDesk(**SIZES)
    groups = [desk.ask([index, 2, 3], 8) for index in range(3)]
    desk.run()
    assert [desk.ids(group) for group in groups] == [expected([position, 2, 3], 8) for position in range(3)]
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
    desk.scheduler.synchronize()
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
    desk.scheduler.discard_cache()
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


def test_prompts_are_read_on_in_a_step_that_is_begun_ahead() -> None:
    desk = FlyingDesk(**SIZES | {"rows": 16}, chunk=4)
    first = desk.ask([1, 2], 20)
    for _ in range(3):
        desk.step()
    desk.runner.most_unseen = 0
    second = desk.ask([*range(30)], 3)
    while not desk.steps_of(second):
        desk.step()
    desk.run()
    assert desk.ids(first) == expected([1, 2], 20) and desk.ids(second) == expected([*range(30)], 3)
    reading = [numbers for numbers in desk.runner.told if len(numbers) == 5]
    assert len(reading) == 7
    assert all(min(items) < 0 for items in reading[1:]), "the newest id of the other was not known"


REPEATS: dict[str, Any] = {"recalls": 1, "pass_rows": 64, "context": 256, "pages": 99, "extra": 64}


def test_what_repeats_itself_is_guessed_and_takes_fewer_steps() -> None:
    guessing, plain = FlyingDesk(guesses=7, **REPEATS), FlyingDesk(**REPEATS)
    for desk in (guessing, plain):
        group = desk.ask(START, 120)
        desk.run()
        assert desk.ids(group) == expected(START, 120, recalls=1)
    assert len(guessing.runner.steps) < len(plain.runner.steps) / 3


def test_what_does_not_repeat_itself_is_begun_ahead() -> None:
    desk = FlyingDesk(guesses=7, **REPEATS | {"recalls": None})
    group = desk.ask([1, 2, 3, 1, 2, 4], 100)
    desk.run()
    assert desk.ids(group) == expected([1, 2, 3, 1, 2, 4], 100)
    assert all(len(numbers) == 1 and numbers[0] < 0 for numbers in desk.runner.told[-64:])


def test_who_turns_to_repeating_is_guessed_again() -> None:
    """Though nothing was guessed for a while: what would have been guessed is looked at."""
    desk = FlyingDesk(guesses=7, **REPEATS)
    group = desk.ask([5], 220)
    desk.run(400)
    sizes = [len(step) for step in desk.runner.steps]
    assert 1 in sizes[20:60] and max(sizes[-20:]) == 8
    assert desk.ids(group) == expected([5], 220, recalls=1)


def test_what_a_constraint_makes_come_takes_fewer_steps() -> None:
    ids = [index**2 % 97 for index in range(30)]
    desk = FlyingDesk(guesses=7, **REPEATS)
    group = desk.ask([1, 2, 3], 22, constraint=DictatedConstraint(ids))
    desk.run()
    assert desk.ids(group) == ids[:22]
    assert len(desk.runner.steps) <= 9


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


def run(desk: Desk, asked: list[dict[str, Any]]) -> list[SequenceGroup]:
    """Jobs come and go at the steps they name."""
    groups: dict[int, SequenceGroup] = {}
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


@given(jobs, st.sampled_from([24, 17]), st.sampled_from([None, 1]), st.sampled_from([0, 1, 7]))
@pytest.mark.thorough
def test_answers_are_those_of_steps_one_by_one(
    asked: list[dict[str, Any]], pages: int, recalls: int | None, guesses: int
) -> None:
    """With guesses and without. Of who is cancelled, as far as they go: it may be heard of a step later."""
    sizes = SIZES | {"pages": pages, "recalls": recalls, "pass_rows": 64, "extra": 64}
    flying, plain = FlyingDesk(**sizes, guesses=guesses), PagedDesk(**sizes)
    ours, theirs = (told(desk, run(desk, asked)) for desk in (flying, plain))
    for one, mine, other in zip(asked, ours, theirs, strict=True):
        if one["goes"] is None:
            assert mine == other
        for (ids, _), (known, _) in zip(mine, other, strict=True):
            assert ids[: len(known)] == known[: len(ids)]
    assert flying.runner.unseen <= 1
