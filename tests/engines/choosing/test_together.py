"""Choices made by several threads are those that one would have made."""

import numpy as np
import pytest

from dragoman.engines.choosing.continuation import Continuation
from dragoman.engines.choosing.together import Choice, Choosers
from dragoman.types import Job, Sampling, Step

PROMPT = np.array([1], np.int32)


def choices(count: int) -> list[Choice]:
    rows = np.random.default_rng(5).normal(size=(count, 500)).astype(np.float32)
    made = []
    for number, row in enumerate(rows):
        heat = 0.0 if number % 3 == 0 else 0.8
        sampling = Sampling(
            max_tokens=9, temperature=heat, top_p=0.9, seed=number, logprobs=number % 2 or None
        )
        answer = Continuation(
            Job(id="job", prompt=(1,), sampling=sampling), 0, PROMPT, vocabulary=500, ends=frozenset(), room=9
        )
        made.append(Choice(answer, row[None]))
    return made


def said(steps: list[Step]) -> list[tuple[list[int], bool]]:
    return [(step.ids, step.logprobs is not None) for step in steps]


@pytest.mark.parametrize("count", [0, 1, 3, 8, 33])
@pytest.mark.parametrize("threads", [2, 3, 40])
def test_the_order_and_the_choices_are_those_of_one_thread(count: int, threads: int) -> None:
    many, one = Choosers(threads), Choosers(1)
    ours, theirs = choices(count), choices(count)
    for _ in range(3):
        assert said(many.advance(ours)) == said(one.advance(theirs))


def test_what_goes_wrong_in_a_thread_is_told() -> None:
    made = choices(12)
    broken = np.array(["x"], dtype=object)
    with pytest.raises(Exception, match=r".+"):
        Choosers(3).advance([*made, Choice(made[1].answer, broken)])
