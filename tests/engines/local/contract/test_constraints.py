"""An answer keeps to its constraint, and ends where that does."""

from typing import Any

import pytest

from dragoman.errors import BadRequest, ConstraintFailed
from tests.engines.local.contract.subject import Subject, ends, ids
from tests.engines.local.support import Path


def test_an_answer_ends_where_its_constraint_does(subject: Subject) -> None:
    steps = subject.run(subject.prompt, 9, constraint=Path(7, 8, 9))
    assert (ids(steps), ends(steps)) == ([7, 8, 9], ["stop"])


def test_continuations_have_matchers_of_their_own(subject: Subject) -> None:
    steps = subject.run(subject.prompt, 9, n=3, temperature=1.0, constraint=Path(7, 8, 9))
    assert [ids(steps, index) for index in range(3)] == [[7, 8, 9]] * 3


def test_the_end_beats_the_length(subject: Subject) -> None:
    assert ends(subject.run(subject.prompt, 3, constraint=Path(7, 8, 9))) == ["stop"]
    assert ends(subject.run(subject.prompt, 2, constraint=Path(7, 8, 9))) == ["length"]


@pytest.mark.parametrize("accepting", [True, False])
def test_an_end_id_that_is_a_marker_does_not_end_an_answer_in_its_middle(
    subject: Subject, accepting: bool
) -> None:
    end = subject.end
    steps = subject.run(subject.prompt, 9, constraint=Path(7, end, 9, accepting=accepting))
    assert ids(steps) == ([7, end] if accepting else [7, end, 9])


def test_a_minimum_does_not_outlast_the_constraint(subject: Subject) -> None:
    steps = subject.run(subject.prompt, 9, min_tokens=5, constraint=Path(7, 8))
    assert (ids(steps), ends(steps)) == ([7, 8], ["stop"])


@pytest.mark.parametrize("kinds", [{"bad_words": ((8,),)}, {"allowed_token_ids": (7,)}])
def test_what_leaves_no_token_is_the_clients_error(subject: Subject, kinds: dict[str, Any]) -> None:
    [steps] = subject.together(subject.job(subject.prompt, 9, constraint=Path(7, 8), **kinds))
    assert (ids(steps), ends(steps)) == ([7], ["error"])
    assert isinstance(steps[-1].error, BadRequest)
    assert steps[-1].error.code == "no_token_left"


def test_a_constraint_that_fails_ends_its_answer_and_no_other(subject: Subject) -> None:
    broken = subject.job(subject.prompt, 4, constraint=Path(7, broken=True))
    steps, others = subject.together(broken, subject.job(subject.prompt[2:], 4, ignore_eos=True))
    assert isinstance(steps[-1].error, ConstraintFailed)
    assert (len(ids(others)), ends(others)) == (4, ["length"])
