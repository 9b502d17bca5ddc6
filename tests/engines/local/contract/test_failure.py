"""Steps that fail or are broken off: who is told, and that nothing wrong stays in memory."""

import pytest

from dragoman.engines.choosing import Logits
from dragoman.engines.local.runner import Rows, StepFailed, StepInterrupted
from dragoman.errors import EngineFailed
from tests.engines.local.contract.subject import Subject, ends, ids
from tests.engines.local.scripted import ScriptedRunner
from tests.engines.local.support import Interrupting
from tests.support.wait import becomes


def test_a_failed_step_ends_its_jobs_and_leaves_nothing_wrong_behind(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = subject.known(subject.prompt)
    step = subject.runner.step

    def fail_once(rows: Rows) -> Logits:
        """Everything is computed and written, and then the step fails after all."""
        monkeypatch.undo()
        step(rows)
        raise StepFailed("as told")

    monkeypatch.setattr(subject.runner, "step", fail_once)
    first, other = subject.job(subject.prompt, 6), subject.job(subject.prompt, 6)
    [failed], steps = subject.together(first, other)
    assert (failed.ids, failed.finish) == ([], "error")
    assert isinstance(failed.error, EngineFailed)
    assert "as told" not in str(failed.error)
    assert ids(steps)[: len(known)] == known
    assert ends(steps) == ["length"]


def test_an_interrupted_step_is_done_again(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    known = subject.known(subject.long_prompt)
    interrupts: list[StepInterrupted] = []
    step = subject.runner.step

    def interrupted(rows: Rows) -> Logits:
        if interrupts:
            return step(rows)
        try:
            with Interrupting(subject.runner.interrupt):
                return step(rows)
        except StepInterrupted as interrupt:
            interrupts.append(interrupt)
            raise

    monkeypatch.setattr(subject.runner, "step", interrupted)
    if isinstance(subject.runner, ScriptedRunner):
        # It is in its step for no time, unless it waits there.
        runner = subject.runner
        monkeypatch.setattr(runner, "before_step", lambda: interrupts or becomes(lambda: runner.interrupted))
    steps = subject.run(subject.long_prompt)
    # With a single thread, as here, OpenVINO does not listen; its own tests have one that does.
    assert len(interrupts) == 1 or "OpenVINO" in subject.engine.card.details.get("runner", "")
    assert ids(steps)[: len(known)] == known
