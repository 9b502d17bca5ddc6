"""Guesses at the next tokens: fewer steps, and the same answers."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dragoman.engines.local.speculation import NgramCache, StepCosts, find_ngram, update_acceptance
from tests.engines.local.paged import PagedDesk
from tests.engines.local.scripted import expected

# Who minds only the newest token says what is 7 more, and after 100 tokens the same again.
START = [7 * index % 100 for index in range(102)]


def desk(guesses: int = 7, **kinds: int) -> PagedDesk:
    return PagedDesk(guesses=guesses, context=256, **{"pages": 99, "pass_rows": 16, "recalls": 1, **kinds})


def said(count: int) -> list[int]:
    return expected(START, count, recalls=1)


@pytest.mark.parametrize(
    ("known", "guess"),
    [
        ([7, 8, 9, 5, 7, 8], [9, 5, 7, 8]),
        ([7, 8, 1, 7, 8, 2, 7, 8], [2, 7, 8]),
        ([4, 4, 4], [4]),
        ([7, 8, 9, 8], []),
        ([8, 9, 7, 8], []),
        ([7, 8], []),
        ([7], []),
        # In bytes, the two newest begin within another id, too.
        ([5, 1, 0, 256, 0], []),
        ([256, 0, 9, 5, 1, 0, 256, 0], [9, 5, 1, 0, 256, 0]),
    ],
)
def test_a_guess_is_what_followed_the_two_newest_tokens(known: list[int], guess: list[int]) -> None:
    assert find_ngram(np.array(known, np.int32), 9) == guess


def test_a_guess_has_a_limit() -> None:
    assert find_ngram(np.array([7, 8, 9, 5, 7, 8], np.int32), 2) == [9, 5]


def test_what_repeats_itself_takes_fewer_steps() -> None:
    with_guesses, without = desk(), desk(0)
    for each in (with_guesses, without):
        group = each.ask(START, 120)
        each.run()
        assert each.ids(group) == said(120)
    assert len(with_guesses.runner.steps) < len(without.runner.steps) / 3


def test_what_does_not_repeat_itself_is_seldom_guessed() -> None:
    each = desk(recalls=0)
    prompt = [1, 2, 3, 1, 2, 4] * 10
    group = each.ask(prompt, 150)
    each.run()
    assert each.ids(group) == expected(prompt, 150)
    late = each.runner.steps[-64:]
    assert sum(len(step) for step in late) < 1.7 * len(late)


def test_where_nothing_repeats_itself_the_next_answer_has_no_rows_more() -> None:
    each = desk(recalls=0)
    for number in range(3):
        each.ask([number, 2, 3, number, 2, 4] * 10, 150)
        each.run()
    assert {len(step) for step in each.runner.steps[-100:]} == {1}


def test_repetition_is_noticed_without_a_guess() -> None:
    """The first hundred tokens are new, then they come again."""
    each = desk()
    group = each.ask([0, 7], 240)
    each.run()
    assert each.ids(group) == expected([0, 7], 240, recalls=1)
    assert len(each.runner.steps) < 180


def test_steps_keep_their_number_of_rows_for_a_while() -> None:
    each = desk(slots=3)
    for _ in range(3):
        each.ask(START, 100)
    each.run()
    sizes = [len(step) for step in each.runner.steps if 0 not in step.positions]
    assert sum(size != after for size, after in pairwise(sizes)) < len(sizes) / 4


def test_with_many_rows_in_a_step_only_a_sure_guess_is_worth_one() -> None:
    sizes = []
    for streams in (1, 32):
        each = desk(slots=32, pages=2048, batch=4096, rows=4096)
        group = [each.ask(START, 8, reuse_prefix=False) for _ in range(streams)][-1]
        each.run()
        sizes.append(max(len(step.ids) for step in each.steps_of(group)))
    assert sizes[0] > sizes[1] == 1


def test_a_stop_id_ends_an_answer_in_the_middle_of_right_guesses() -> None:
    each, whole = desk(), said(120)
    stop = whole[50]
    group = each.ask(START, 120, stop_token_ids=(stop,))
    each.run()
    assert each.ids(group) == whole[: whole.index(stop) + 1]
    assert each.finish(group) == "stop"


def test_every_token_has_its_log_probability() -> None:
    each = desk()
    group = each.ask(START, 60, logprobs=1)
    each.run()
    steps = each.steps_of(group)
    assert max(len(step.ids) for step in steps) > 1
    assert [[entry.id for entry in step.logprobs or ()] for step in steps] == [step.ids for step in steps]


def test_a_seed_draws_the_same_with_guesses_and_without() -> None:
    answers = []
    for guesses in (0, 7):
        each = desk(guesses)
        group = each.ask(START, 100, temperature=0.6, seed=3)
        each.run()
        answers.append(each.ids(group))
    assert answers[0] == answers[1]


def test_the_next_turn_builds_on_an_answer_that_was_guessed() -> None:
    each = desk(page=4)
    each.ask(START, 60)
    each.run()
    longer = [*START, *said(60), 1, 2, 3]
    group = each.ask(longer, 5)
    each.run()
    assert each.cached(group) == len(START) + 59
    assert each.ids(group) == expected(longer, 5, recalls=1)


def test_nobody_steps_back_for_a_guess() -> None:
    # There is room for both answers, and for no guess that crosses into a page more.
    each = desk(slots=2, page=16, pages=16)
    groups = [each.ask(START, 25, reuse_prefix=False) for _ in range(2)]
    each.run()
    assert [each.ids(group) for group in groups] == [said(25)] * 2
    assert sum(step.positions.count(0) for step in each.runner.steps) == 2


def test_trust_grows_with_right_guesses_and_comes_back_after_wrong_ones() -> None:
    sequence = desk().ask(START, 1).sequences[0]
    for _ in range(4):
        update_acceptance(sequence, guessed=3, right=3)
    assert sequence.acceptance_rate is not None and sequence.acceptance_rate > 0.8
    for _ in range(30):
        update_acceptance(sequence, guessed=1, right=0)
    assert sequence.acceptance_rate < 0.1
    for _ in range(200):
        update_acceptance(sequence, guessed=0, right=0)
    assert 0.3 < sequence.acceptance_rate <= 0.5


def test_who_comes_later_begins_with_what_guesses_were_worth_before() -> None:
    each = desk(recalls=0)
    sizes = []
    for _ in range(6):
        before = len(each.runner.steps)
        each.ask([1, 2, 3, 1, 2, 4] * 10, 60, reuse_prefix=False)
        each.run()
        sizes.append(sum(len(step) for step in each.runner.steps[before + 1 :]))
    assert sizes[-1] < 0.9 * sizes[0]


def test_a_guess_that_costs_nothing_is_made_though_it_is_seldom_right() -> None:
    costs = StepCosts(16)
    for each in (0, 1, 3):
        for _ in range(9):
            costs.note(1, each, 0.04 if each == 3 else 0.03)
    assert costs.of(1, 1) == costs.of(1, 0)
    assert costs.of(1, 3) > 1.3 * costs.of(1, 0)


def test_what_was_not_seen_yet_costs_what_its_rows_do() -> None:
    costs = StepCosts(16)
    unknown = costs.of(4, 3) / costs.of(4, 0)
    for _ in range(3):
        costs.note(4, 0, 0.03)
    assert costs.of(4, 3) / costs.of(4, 0) == pytest.approx(unknown)


def test_a_single_slow_step_moves_little() -> None:
    costs = StepCosts(16)
    for seconds in (0.5, 0.03, 0.03, 0.03, 3.0):
        costs.note(1, 0, seconds)
    assert costs.of(1, 0) < 0.04


def test_what_was_seen_long_ago_counts_no_more() -> None:
    costs = StepCosts(16)
    for _ in range(3):
        costs.note(1, 1, 9.0)
    for _ in range(3000):
        costs.note(1, 0, 0.03)
    assert costs.of(1, 1) < 0.04


def test_a_phrase_is_what_followed_the_last_time() -> None:
    phrases = NgramCache(9)
    phrases.note(b"", [1, 2, 3, 4, 5])
    assert phrases.after(b"", [1, 2], 9) == [3, 4, 5]
    assert phrases.after(b"", [1, 2], 2) == [3, 4]
    phrases.note(b"", [2, 3, 9])
    assert phrases.after(b"", [1, 2], 9) == [3, 9]


def test_phrases_go_round_in_circles_only_as_far_as_wanted() -> None:
    phrases = NgramCache(9)
    phrases.note(b"", [1, 2, 1, 2])
    assert phrases.after(b"", [1, 2], 5) == [1, 2, 1, 2, 1]


def test_the_oldest_phrases_are_forgotten() -> None:
    phrases = NgramCache(2)
    phrases.note(b"", [1, 2, 3, 4, 5])
    assert [phrases.after(b"", pair, 1) for pair in ([1, 2], [2, 3], [3, 4])] == [[], [4], [5]]


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ({}, {}, True),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, True),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, False),
        ({}, {"adapters": (("red", 1.0),)}, False),
        ({"reuse_prefix": False}, {}, False),
        ({}, {"reuse_prefix": False}, False),
    ],
)
def test_phrases_are_shared_like_prefixes(
    first: dict[str, Any], second: dict[str, Any], shared: bool
) -> None:
    each = desk()
    each.ask([5], 40, **first)
    each.run()
    group = each.ask([96, 5 + 7], 20, **second)
    each.run()
    assert (max(len(step.ids) for step in each.steps_of(group)) > 1) == shared


class DictatedConstraint:
    """A constraint that lets one answer pass, and can tell so."""

    is_accepting = is_complete = False
    source = None

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def new_matcher(self) -> "DictatedConstraint":
        return DictatedConstraint(self._ids)

    def forced_tokens(self, most: int) -> list[int]:
        return self._ids[:most]

    def mask(self, row: Any) -> None:
        row[np.arange(len(row)) != self._ids[0]] = -np.inf

    def accept(self, id_: int) -> None:
        self._ids = self._ids[1:]


@pytest.mark.parametrize(("guesses", "steps"), [(0, 22), (7, 8)])
def test_what_a_constraint_makes_come_takes_fewer_steps(guesses: int, steps: int) -> None:
    ids = [index**2 % 97 for index in range(30)]
    each = desk(guesses)
    group = each.ask([1, 2, 3], 22, constraint=DictatedConstraint(ids))
    each.run()
    assert each.ids(group) == ids[:22]
    assert len(each.runner.steps) <= steps
