"""What is told about a prompt: once, and about all of it."""

import pytest

from tests.engines.local.contract.subject import Subject, ids
from tests.engines.local.scripted import following


def test_it_is_told_in_the_first_step_only(subject: Subject) -> None:
    first, *others = subject.run(subject.prompt, 3, n=3, prompt_logprobs=2)
    assert first.cached_tokens == 0
    assert first.prompt_logprobs is not None
    assert all(step.cached_tokens is None and step.prompt_logprobs is None for step in others)


def test_log_probabilities_are_complete_and_in_order(subject: Subject) -> None:
    """More of them are wanted than rows of logits are made in one step, and none is taken from a cache."""
    prompt = subject.long_prompt
    subject.run(prompt, 1)
    [step] = subject.run(prompt, 1, prompt_logprobs=2)
    assert step.cached_tokens == 0
    assert step.prompt_logprobs is not None
    nothing, *logprobs = step.prompt_logprobs
    assert nothing is None
    assert [entry.id for entry in logprobs if entry] == prompt[1:]
    assert all(len(entry.top) == 2 and entry.logprob <= entry.top[0][1] + 1e-6 for entry in logprobs if entry)
    if subject.scripted:
        best = [entry.top[0][0] for entry in logprobs if entry]
        assert best == [following(prompt[:length]) for length in range(1, len(prompt))]


def test_they_agree_with_those_of_an_answer(subject: Subject) -> None:
    """What was said of an id when it was generated is said of it as part of a prompt."""
    steps = subject.run(subject.prompt, 4, logprobs=0)
    values = [entry.logprob for step in steps for entry in step.logprobs or ()]
    about = subject.run([*subject.prompt, *ids(steps)], 1, prompt_logprobs=0)[0].prompt_logprobs
    assert about is not None
    assert [entry.logprob for entry in about[-4:] if entry] == pytest.approx(values, abs=0.15)
