"""A guard around a runner: failed steps are detected, counted and logged, and the runner is repaired.

A native library can fail in three ways: it raises, it returns logits that are not finite, or it is in a state
in which every further step fails. None of them may end the engine thread, or an answer that was not part of
it. The scheduler decides which sequences are retried (see `Scheduler._recover`); this file repairs the
runner:

    first failure           `reset`: fresh requests, in milliseconds
    failure of the retry    `rebuild`: everything but the weights is recreated, which takes seconds
    more than three         RunnerFailed: the engine takes no more requests, readiness reports it, and a
    rebuilds in a minute    supervisor opens a new one
"""

import logging
import time
from collections import deque

import numpy as np

from dragoman.engines.local.runner import AnyRunner, StepFailed, StepInterrupted, StepRows
from dragoman.engines.protocol import EngineFaults, RunnerFailed
from dragoman.engines.sampling import Logits

_log = logging.getLogger("dragoman.engine")
MOST_REBUILDS, WITHIN_S = 3, 60.0
_SAME_MESSAGE_S = 60.0
_LONGEST_TEXT = 300


class StepGuard:
    """Computes the steps of a runner. For the engine thread only."""

    def __init__(self, runner: AnyRunner) -> None:
        self._runner = runner
        self.faults = EngineFaults()
        self._rebuilt_at: deque[float] = deque(maxlen=MOST_REBUILDS)
        self._logged_at: dict[str, float] = {}
        self._reason = ""

    def step(self, rows: StepRows) -> Logits:
        """Compute a step, as `Runner.step`; anything the runner raises becomes a StepFailed."""
        try:
            return self._runner.step(rows)
        except StepInterrupted:
            raise
        except Exception as error:
            self.note(error, f"a step of {len(rows)} rows")
            raise StepFailed(self._reason) from error

    def note(self, error: Exception, what: str) -> None:
        """Count a failure and log its reason, each kind once a minute."""
        self.faults.failed_steps += 1
        self._reason = _text_of(error)
        self._log_once(f"{type(error).__name__} {what.split(' of ')[0]}", f"{what} failed: {self._reason}")

    def rows_without_numbers(self, logits: Logits) -> list[int]:
        """Return the rows whose largest logit is not finite. Rows on a device are checked by the sampler."""
        if not isinstance(logits, np.ndarray) or not len(logits):
            return []
        # The maximum of a row is NaN if any of its numbers is.
        largest = logits.max(axis=1)
        rows: list[int] = np.flatnonzero(~np.isfinite(largest)).tolist()
        if rows:
            self.faults.failed_steps += 1
            self._reason = "logits were not finite"
            self._log_once("rows", f"{len(rows)} of {len(logits)} rows of logits were not finite")
        return rows

    def reset(self) -> bool:
        """Reset the runner after a first failure; return False if that failed as well, so that it must be
        rebuilt.
        """
        try:
            self._runner.reset()
        except Exception as error:
            self.note(error, "a reset of the runner")
            return False
        return True

    def rebuild(self) -> None:
        """Rebuild the runner. Raises RunnerFailed after too many rebuilds, or if it fails."""
        now = time.monotonic()
        if len(self._rebuilt_at) == MOST_REBUILDS and now - self._rebuilt_at[0] < WITHIN_S:
            _log.error("Runner failed again after %d rebuilds: %s", MOST_REBUILDS, self._reason)
            message = (
                f"The model failed again after {MOST_REBUILDS} rebuilds within a minute; see the server log."
            )
            raise RunnerFailed(message)
        self._rebuilt_at.append(now)
        self.faults.rebuilds += 1
        _log.warning("Rebuilding the runner after repeated failures: %s", self._reason)
        try:
            self._runner.rebuild()
        except Exception as error:
            _log.error("Cannot rebuild the runner: %s", _text_of(error))
            raise RunnerFailed(
                "The model could not be reloaded after a failure; see the server log."
            ) from error
        _log.warning("Runner rebuilt in %.1f seconds", time.monotonic() - now)

    def _log_once(self, kind: str, message: str) -> None:
        now = time.monotonic()
        if now - self._logged_at.get(kind, -_SAME_MESSAGE_S) >= _SAME_MESSAGE_S:
            self._logged_at[kind] = now
            _log.error("%s", message)


def _text_of(error: Exception) -> str:
    """Return a library's message as one line. It may be logged: libraries report shapes and nodes, never
    prompts.
    """
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:_LONGEST_TEXT]
