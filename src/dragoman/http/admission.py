"""Who is let in, until when, and one way to end those who are inside.

A request is let in before its body is read, so that a refusal costs next to nothing. Inside, its work waits
in line until the engine has a place for it.
"""

import asyncio
import math
from collections import Counter
from types import TracebackType

from dragoman.errors import DeadlineExceeded, Overloaded, Unavailable
from dragoman.http.keys import keys_of
from dragoman.http.metrics import Metrics
from dragoman.settings import Settings
from dragoman.turns.line import Line

PLACES_PER_SLOT = 2
"""Answers that the engine is given for each that it computes: it never waits, and the rest has an order."""
PLACES = 1024
"""Where an engine does not say how much it computes at the same time."""
LONGEST_RETRY_S = 30
PATIENCE_S = 0.4
"""What those who are ended get to tell it to their clients."""


class Admission:
    """The line of what is computed, and the requests that stand in it or are about to."""

    def __init__(self, settings: Settings, slots: int | None, metrics: Metrics) -> None:
        limits = settings.limits
        places = limits.in_flight or (PLACES_PER_SLOT * slots if slots else PLACES)
        self.line = Line(places)
        self.timeout = settings.request_timeout
        self.draining = False
        self._most = places + limits.queue
        # Of several keys, none can keep all others out.
        share = self._most if len(keys_of(settings)) < 2 else -(-self._most // 2)
        self._most_of_key = limits.per_key or share
        self._inside: set[Visit] = set()
        self._of_key: Counter[str] = Counter()
        self._emptied: asyncio.Future[None] | None = None
        self._refused = metrics.refused
        metrics.running.set_function(lambda: self.line.running)
        metrics.waiting.set_function(lambda: self.line.waiting)

    @property
    def inside(self) -> int:
        return len(self._inside)

    def admitted(self, owner: str) -> "Visit":
        """Refuses at once what there is no room for."""
        if self.draining:
            self._refused.labels("stopping").inc()
        self.check()
        if len(self._inside) >= self._most:
            raise self._refusal("queue", f"{self._most} requests are being served or wait; try again soon.")
        if owner and self._of_key[owner] >= self._most_of_key:
            message = (
                f"{self._most_of_key} requests of this key are being served or wait; let one of them end."
            )
            raise self._refusal("key", message)
        return Visit(self, owner)

    def check(self) -> None:
        """Raises when nothing is let in any more."""
        if self.draining:
            raise Unavailable("The server is stopping; try again.", code="stopping")

    def _refusal(self, reason: str, message: str) -> Overloaded:
        self._refused.labels(reason).inc()
        until_free = math.ceil(self.line.pace * (self.line.waiting + 1))
        return Overloaded(message, retry_after=max(1, min(until_free, LONGEST_RETRY_S)))

    async def end_all(self) -> None:
        """Nothing is let in any more, and everybody inside has a moment to tell why it ended."""
        self.draining = True
        for visit in list(self._inside):
            visit.end(Unavailable("The server was stopped before the answer was done; try again."))
        await self.emptied(PATIENCE_S)

    async def emptied(self, most: float) -> None:
        """Returns when nobody is inside, or after so many seconds."""
        if self._inside:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._emptied}, timeout=most)

    def enter(self, visit: "Visit") -> None:
        self._inside.add(visit)
        self._of_key[visit.owner] += 1

    def leave(self, visit: "Visit") -> None:
        self._inside.discard(visit)
        self._of_key[visit.owner] -= 1
        if not self._of_key[visit.owner]:
            del self._of_key[visit.owner]
        if not self._inside and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)


class Visit:
    """One request inside. `with` it: what ends it early cancels the task, and is raised here instead.

    So come the deadline and the shutdown: to the work each is one cancellation, whose scopes abort the jobs.
    """

    def __init__(self, admission: Admission, owner: str) -> None:
        self.owner = owner
        self.error: Exception | None = None
        """Why it was ended before it was done."""
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._counts = True
        admission.enter(self)

    def within(self, seconds: float | None) -> None:
        """It is ended so many seconds after it began; None: as the settings say."""
        seconds = seconds or self._admission.timeout
        if seconds is not None:
            message = f"The answer was not done within the timeout of {seconds:g} seconds."
            when = self._began + seconds
            self._timer = self._loop.call_at(when, lambda: self.end(DeadlineExceeded(message)))

    def end(self, error: Exception) -> None:
        if self.error is None and self._counts:
            self.error = error
            if self._task is not None:
                self._task.cancel()

    def handed_on(self) -> "Visit":
        """Its place, for work that goes on in a task of its own."""
        self._leave()
        return Visit(self._admission, self.owner)

    def __enter__(self) -> "Visit":
        self._task = asyncio.current_task()
        if self.error is not None and self._task is not None:
            self._task.cancel()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if self.error is None or self._task is None:
            return
        # As in asyncio.timeout: if somebody else cancels the task too, theirs is the word.
        if self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self.error from None

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._counts:
            self._counts = False
            self._admission.leave(self)
