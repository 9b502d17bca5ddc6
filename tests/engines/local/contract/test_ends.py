"""What ends an answer before its length does."""

from tests.engines.local.contract.subject import Subject, ids

SURE = 1000.0
"""Added to a logit, this decides."""


def test_a_stop_id_is_told_and_included(subject: Subject) -> None:
    known = subject.known(subject.prompt)
    third = known[2]
    steps = subject.run(subject.prompt, 9, stop_token_ids=frozenset({third}))
    assert ids(steps) == known[: known.index(third) + 1]
    assert (steps[-1].finish, steps[-1].stop_id) == ("stop", third)


def test_the_models_own_end(subject: Subject) -> None:
    [step] = subject.run(subject.prompt, 5, logit_bias={subject.end: SURE})
    assert (step.ids, step.finish, step.stop_id) == ([subject.end], "stop", None)


def test_the_models_end_can_be_ignored(subject: Subject) -> None:
    steps = subject.run(subject.prompt, 5, logit_bias={subject.end: SURE}, ignore_eos=True)
    assert (ids(steps), steps[-1].finish) == ([subject.end] * 5, "length")


def test_a_minimum_puts_off_the_end(subject: Subject) -> None:
    steps = subject.run(subject.prompt, 9, logit_bias={subject.end: SURE}, min_tokens=3)
    numbers = ids(steps)
    assert (len(numbers), numbers.index(subject.end)) == (4, 3)
    assert steps[-1].finish == "stop"


def test_a_minimum_puts_off_a_stop_id(subject: Subject) -> None:
    kinds = {"logit_bias": {91: SURE}, "stop_token_ids": frozenset({91})}
    assert ids(subject.run(subject.prompt, 9, **kinds)) == [91]
    assert ids(subject.run(subject.prompt, 9, min_tokens=2, **kinds)).index(91) == 2
