"""How the next id is chosen, and what is told of its probability."""

import math
from typing import Any

import pytest

from dragoman.errors import BadRequest
from tests.engines.local.contract.subject import Subject, ends, ids

# Two ids that nothing else comes near, so that rules alone decide between them.
FIRST, SECOND = 91, 92
BIAS = {FIRST: 1000.0, SECOND: 900.0}


@pytest.mark.parametrize(
    ("rule", "answer"),
    [
        ({}, [FIRST, FIRST, FIRST, FIRST]),
        ({"presence_penalty": 200.0}, [FIRST, SECOND, FIRST, FIRST]),
        ({"frequency_penalty": 150.0}, [FIRST, SECOND, FIRST, SECOND]),
        ({"repetition_penalty": 2.0}, [FIRST, SECOND, FIRST, FIRST]),
        ({"bad_words": ((FIRST, FIRST),)}, [FIRST, SECOND, FIRST, SECOND]),
        ({"allowed_token_ids": (SECOND,)}, [SECOND, SECOND, SECOND, SECOND]),
        ({"temperature": 1.0}, [FIRST, FIRST, FIRST, FIRST]),
    ],
    ids=lambda value: next(iter(value), "none") if isinstance(value, dict) else "",
)
def test_rules_decide(subject: Subject, rule: dict[str, Any], answer: list[int]) -> None:
    assert ids(subject.run(subject.prompt, 4, logit_bias=BIAS, **rule)) == answer


def test_repetition_counts_the_prompt(subject: Subject) -> None:
    steps = subject.run([*subject.prompt, FIRST], 2, logit_bias=BIAS, repetition_penalty=2.0)
    assert ids(steps) == [SECOND, FIRST]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_a_choice_of_one_is_greedy(subject: Subject, narrow: dict[str, Any]) -> None:
    known = subject.known(subject.prompt)
    steps = subject.run(subject.prompt, len(known), temperature=1.0, seed=1, **narrow)
    assert ids(steps) == known


def test_a_seed_draws_the_same_again(subject: Subject) -> None:
    kinds: dict[str, Any] = {"n": 6, "temperature": 2.0, "seed": 1, "reuse_prefix": False}
    answers = []
    for _ in range(2):
        steps = subject.run(subject.prompt, 4, **kinds)
        answers.append([tuple(ids(steps, index)) for index in range(6)])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


def test_other_seeds_draw_otherwise(subject: Subject) -> None:
    answers = {tuple(ids(subject.run(subject.prompt, 6, temperature=2.0, seed=seed))) for seed in range(4)}
    assert len(answers) > 1


def test_every_id_has_its_log_probability(subject: Subject) -> None:
    steps = subject.run(subject.prompt, 6, logprobs=5)
    assert [[entry.id for entry in step.logprobs or ()] for step in steps] == [step.ids for step in steps]
    for entry in (entry for step in steps for entry in step.logprobs or ()):
        assert entry.top[0] == (entry.id, entry.logprob), "greedy takes the most likely"
        values = [value for _, value in entry.top]
        assert (len(values), sorted(values, reverse=True)) == (5, values)
        assert sum(map(math.exp, values)) <= 1 + 1e-4


def test_log_probabilities_are_the_models_own(subject: Subject) -> None:
    """They are told as they were before any rule."""
    plain = subject.run(subject.prompt, 1, logprobs=1)[0].logprobs
    ruled = subject.run(subject.prompt, 1, logprobs=1, logit_bias=BIAS)[0].logprobs
    assert plain and ruled
    assert (ruled[0].id, ruled[0].top[0][0]) == (FIRST, plain[0].id)
    assert ruled[0].logprob < ruled[0].top[0][1]


def test_nothing_left_to_choose_is_an_error_of_that_job_only(subject: Subject) -> None:
    impossible = subject.job([1], 3, allowed_token_ids=(5,), bad_words=((5,),))
    steps, others = subject.together(impossible, subject.job(subject.prompt, 3))
    assert isinstance(steps[-1].error, BadRequest)
    assert steps[-1].error.code == "no_token_left"
    assert (ends(steps), ends(others)) == (["error"], ["length"])
