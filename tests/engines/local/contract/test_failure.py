"""Steps that fail: clients hear of it only where a second try fails, and nothing wrong stays in memory."""

import pytest

from dragoman.engines.local.runner import StepFailed, StepRows
from dragoman.engines.sampling import Logits
from dragoman.errors import EngineFailed
from tests.engines.local.contract.subject import Subject, ends, ids


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_fails_is_computed_again(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Everything is computed and written, and then the step fails after all."""
    known = subject.known(subject.prompt)
    step, left = subject.runner.step, [*range(times)]

    def fail(rows: StepRows) -> Logits:
        logits = step(rows)
        if left and subject.prompt[-1] in rows.tokens:
            left.pop()
            raise StepFailed("as told")
        return logits

    monkeypatch.setattr(subject.runner, "step", fail)
    first, other = subject.job(subject.prompt, 6), subject.job(subject.prompt, 6)
    answers = subject.together(first, other)
    failed = [steps for steps in answers if ends(steps) == ["error"]]
    for steps in answers:
        if steps not in failed:
            assert ids(steps)[: len(known)] == known
    assert len(failed) == times - 1
    for [step_] in failed:
        assert isinstance(step_.error, EngineFailed)
        assert "as told" not in str(step_.error)
