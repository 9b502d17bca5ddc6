"""Choices are those of one thread; masks are worked out by several, ahead of time."""

import threading
from typing import Any, cast

import numpy as np
import pytest

from dragoman.engines.sampling import Logits
from dragoman.engines.sampling.batched import Continuation, StepSampler, TokenChoice
from dragoman.errors import EngineFailed
from dragoman.types import Job, Sampling, Step

PROMPT = np.array([1], np.int32)
SAME: Logits = np.zeros((1, 500), np.float32)


def rows(count: int) -> Logits:
    return np.random.default_rng(5).normal(size=(count, 500)).astype(np.float32)


def choices(count: int) -> list[TokenChoice]:
    token_choices = []
    for number in range(count):
        heat = 0.0 if number % 3 == 0 else 0.8
        sampling = Sampling(
            max_tokens=9, temperature=heat, top_p=0.9, seed=number, logprobs=number % 2 or None
        )
        answer = Continuation(
            Job(id="job", prompt=(1,), sampling=sampling), 0, PROMPT, vocabulary=500, ends=frozenset(), room=9
        )
        token_choices.append(TokenChoice(answer, number))
    return token_choices


def said(steps: list[Step]) -> list[tuple[list[int], bool]]:
    return [(step.ids, step.logprobs is not None) for step in steps]


@pytest.mark.parametrize("count", [0, 1, 3, 8, 33])
@pytest.mark.parametrize("threads", [2, 3, 40])
def test_the_order_and_the_choices_are_those_of_one_thread(count: int, threads: int) -> None:
    many, one = StepSampler(threads), StepSampler(1)
    ours, theirs = choices(count), choices(count)
    for _ in range(3):
        assert said(many.advance(ours, rows(count))) == said(one.advance(theirs, rows(count)))


class Slow:
    """A constraint whose mask lets one id pass, and that remembers on which thread it was prepared."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.prepared: list[str] = []
        self.is_accepting, self.is_complete = False, False

    def new_matcher(self) -> "Slow":
        return self

    def precompute_mask(self) -> None:
        self.prepared.append(threading.current_thread().name)

    def mask(self, row: Any) -> None:
        row[np.arange(len(row)) != self.allowed] = -np.inf

    def accept(self, id_: int) -> None:
        pass


def constrained(constraint: Slow, most: int = 9) -> TokenChoice:
    asked = Job(id="job", prompt=(1,), sampling=Sampling(max_tokens=most), constraint=cast(Any, constraint))
    answer = Continuation(asked, 0, PROMPT, vocabulary=500, ends=frozenset(), room=9)
    return TokenChoice(answer, 0)


def test_masks_are_prepared_by_other_threads_before_the_next_choice() -> None:
    constraints = [Slow(number) for number in range(5)]
    choosers, token_choices = StepSampler(2), [constrained(each) for each in constraints]
    for _ in range(2):
        assert [step.ids for step in choosers.advance(token_choices, SAME)] == [
            [each.allowed] for each in constraints
        ]
    assert all(each.prepared[0].startswith("dragoman-mask") for each in constraints)


def test_nothing_is_prepared_for_an_answer_that_has_ended() -> None:
    constraint, choosers = Slow(3), StepSampler(2)
    choosers.advance([constrained(constraint, most=1)], SAME)
    choosers.advance([], SAME)
    assert constraint.prepared == []


def test_a_row_that_cannot_be_sampled_ends_its_answer_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Slow):
        def mask(self, row: Any) -> None:
            raise ZeroDivisionError

    failed, good = StepSampler(3).advance([constrained(Broken(1)), constrained(Slow(2))], rows(1))
    assert failed.finish == "error" and isinstance(failed.error, EngineFailed)
    assert good.ids == [2] and good.error is None
    assert caplog.records
