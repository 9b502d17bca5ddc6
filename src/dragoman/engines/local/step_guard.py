"""A runner behind a guard: a step that fails is noticed, counted and told, and the runner is put right.

A native library can fail in three ways: it raises, it gives logits that are not numbers, or it has come into
a state in which every further step fails. None of them may end the engine's thread, or an answer that had no
part in it. The scheduler decides which sequences are computed again (see `Scheduler._recover`); this file
knows what it takes of the runner:

    first failure           `reset`: fresh requests, in milliseconds
    failure of the retry    `rebuild`: everything but the weights is set up again, which takes seconds
    more than three         EngineFailed: the engine takes no more requests, readiness says so, and a
    rebuilds in a minute    supervisor opens a new one
"""

import logging
import time
from collections import deque

import numpy as np

from dragoman.engines.choosing import Logits
from dragoman.engines.local.runner import AnyRunner, Rows, StepFailed, StepInterrupted
from dragoman.engines.protocol import EngineFaults
from dragoman.errors import EngineFailed

_log = logging.getLogger("dragoman.engine")
MOST_REBUILDS, WITHIN_S = 3, 60.0
_SAME_MESSAGE_S = 60.0
_LONGEST_TEXT = 300


class StepGuard:
    """Computes the steps of a runner. For the engine's thread only."""

    def __init__(self, runner: AnyRunner) -> None:
        self._runner = runner
        self.faults = EngineFaults()
        self._rebuilt_at: deque[float] = deque(maxlen=MOST_REBUILDS)
        self._logged_at: dict[str, float] = {}
        self._reason = ""

    def step(self, rows: Rows) -> Logits:
        """As `Runner.step`; whatever the runner raises is a StepFailed."""
        try:
            return self._runner.step(rows)
        except StepInterrupted:
            raise
        except Exception as error:
            self.note(error, f"a step of {len(rows)} rows")
            raise StepFailed(self._reason) from error

    def note(self, error: Exception, what: str) -> None:
        """Count a failure, and log its reason: each kind once a minute."""
        self.faults.failed_steps += 1
        self._reason = _text_of(error)
        self._log_once(f"{type(error).__name__} {what.split(' of ')[0]}", f"{what} failed: {self._reason}")

    def rows_without_numbers(self, logits: Logits) -> list[int]:
        """Rows in which the largest logit is not a finite number. Of rows on a device the sampler knows."""
        if not isinstance(logits, np.ndarray) or not len(logits):
            return []
        # The maximum of a row is NaN where any of its numbers is.
        largest = logits.max(axis=1)
        rows: list[int] = np.flatnonzero(~np.isfinite(largest)).tolist()
        if rows:
            self.faults.failed_steps += 1
            self._reason = "logits were not numbers"
            self._log_once("rows", f"{len(rows)} of {len(logits)} rows of logits were not numbers")
        return rows

    def reset(self) -> bool:
        """After a first failure; False where that failed as well, so that only a rebuild is left."""
        try:
            self._runner.reset()
        except Exception as error:
            self.note(error, "a reset of the runner")
            return False
        return True

    def rebuild(self) -> None:
        """Raises EngineFailed where that was done too often, or cannot be done."""
        now = time.monotonic()
        if len(self._rebuilt_at) == MOST_REBUILDS and now - self._rebuilt_at[0] < WITHIN_S:
            _log.error("the runner failed again after %d rebuilds: %s", MOST_REBUILDS, self._reason)
            message = (
                f"The model failed again after {MOST_REBUILDS} rebuilds within a minute; the log says why."
            )
            raise EngineFailed(message)
        self._rebuilt_at.append(now)
        self.faults.rebuilds += 1
        _log.warning("the runner is rebuilt after repeated failures: %s", self._reason)
        try:
            self._runner.rebuild()
        except Exception as error:
            _log.error("the runner cannot be set up again: %s", _text_of(error))
            raise EngineFailed(
                "The model cannot be set up again after a failure; the log says why."
            ) from error
        _log.warning("the runner is rebuilt, after %.1f seconds", time.monotonic() - now)

    def _log_once(self, kind: str, message: str) -> None:
        now = time.monotonic()
        if now - self._logged_at.get(kind, -_SAME_MESSAGE_S) >= _SAME_MESSAGE_S:
            self._logged_at[kind] = now
            _log.error("%s", message)


def _text_of(error: Exception) -> str:
    """A library's own words, on one line: it knows shapes and nodes, and nothing of prompts."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:_LONGEST_TEXT]
