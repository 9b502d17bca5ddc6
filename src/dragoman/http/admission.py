"""Who is let in, until when, and one way to end those who are inside.

A request is let in before its body is read, so that a refusal costs next to nothing. Inside, its work waits
in line until the engine has a place for it. Requests that only look (tokens, prompts, what is stored) take
none of the engine's time: they are counted apart, so that no flood of them keeps answers out.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from dragoman.errors import DeadlineExceeded, Overloaded, Unavailable
from dragoman.http.journal import Metrics
from dragoman.http.keys import keys_of
from dragoman.settings import Settings
from dragoman.turns.line import Line
from dragoman.turns.workers import Workers

PLACES_PER_SLOT = 2
"""Answers that the engine is given for each that it computes: it never waits, and the rest has an order."""
PLACES = 1024
"""Where an engine does not say how much it computes at the same time."""
LONGEST_RETRY_S = 30
PATIENCE_S = 0.4
"""What those who are ended get to tell it to their clients."""


class Room:
    """So many requests fit in, and beyond them those of keys that have less than an equal share inside."""

    def __init__(self, most: int, most_of_key: int, delay: Callable[[], float]) -> None:
        self.most = most
        self.most_of_key = most_of_key
        self.delay = delay
        """Seconds until there may be room again, about."""
        self.inside: set[Visit] = set()
        self._of_key: Counter[str] = Counter()

    def full_for(self, owner: str) -> bool:
        keys = len(self._of_key.keys() | {owner})
        return len(self.inside) >= self.most and self._of_key.get(owner, 0) >= max(1, self.most // keys)

    def full_of(self, owner: str) -> bool:
        return bool(owner) and self._of_key.get(owner, 0) >= self.most_of_key

    def has_others(self, owner: str) -> bool:
        """Than this key."""
        return any(key != owner for key in self._of_key)

    def add(self, visit: "Visit") -> None:
        self.inside.add(visit)
        self._of_key[visit.owner] += 1

    def remove(self, visit: "Visit") -> None:
        self.inside.discard(visit)
        self._of_key[visit.owner] -= 1
        if not self._of_key[visit.owner]:
            self._of_key.pop(visit.owner)


class Admission:
    """The line of what is computed, the requests that stand in it or are about to, and those that look."""

    def __init__(self, settings: Settings, slots: int | None, metrics: Metrics, workers: Workers) -> None:
        limits = settings.limits
        places = limits.in_flight or (PLACES_PER_SLOT * slots if slots else PLACES)
        # What the operator says is kept to; else there may be more, so that every key has its share.
        self.line = Line(places, limits.in_flight or 2 * places, several=len(keys_of(settings)) > 1)
        self.timeout = settings.request_timeout
        self.draining = False
        most, alone = places + limits.queue, len(keys_of(settings)) < 2
        share, looking = (each if alone else -(-each // 2) for each in (most, limits.looking))
        line = self.line
        self._asking = Room(most, limits.per_key or share, lambda: line.pace * (line.waiting + 1))
        self._looking = Room(limits.looking, min(limits.per_key or looking, looking), lambda: workers.delay)
        workers.others_wait = self._asking.has_others
        self._emptied: asyncio.Future[None] | None = None
        self._refused = metrics.refused
        metrics.running.set_function(lambda: self.line.running)
        metrics.waiting.set_function(lambda: self.line.waiting)

    @property
    def inside(self) -> int:
        return len(self._asking.inside) + len(self._looking.inside)

    def admitted(self, owner: str, *, looks: bool = False) -> "Visit":
        """Refuses at once what there is no room for."""
        if self.draining:
            self._refused.labels("stopping").inc()
        self.check()
        room = self._looking if looks else self._asking
        if room.full_for(owner):
            raise self._refusal(
                room, "queue", f"{room.most} requests are being served or wait; try again soon."
            )
        if room.full_of(owner):
            most = room.most_of_key
            message = f"{most} requests of this key are being served or wait; let one of them end."
            raise self._refusal(room, "key", message)
        return Visit(self, room, owner)

    def check(self) -> None:
        """Raises when nothing is let in any more."""
        if self.draining:
            raise Unavailable("The server is stopping; try again.", code="stopping")

    def _refusal(self, room: Room, reason: str, message: str) -> Overloaded:
        self._refused.labels(reason).inc()
        return Overloaded(message, retry_after=max(1, min(math.ceil(room.delay()), LONGEST_RETRY_S)))

    async def end_all(self) -> None:
        """Nothing is let in any more, and everybody inside has a moment to tell why it ended."""
        self.draining = True
        for visit in (*self._asking.inside, *self._looking.inside):
            visit.end(Unavailable("The server was stopped before the answer was done; try again."))
        await self.emptied(PATIENCE_S)

    async def emptied(self, most: float) -> None:
        """Returns when nobody is inside, or after so many seconds."""
        if self.inside:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._emptied}, timeout=most)

    def left(self) -> None:
        if not self.inside and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)


class Visit:
    """One request inside. `with` it: what ends it early cancels the task, and is raised here instead.

    So come the deadline and the shutdown: to the work each is one cancellation, whose scopes abort the jobs.
    """

    def __init__(self, admission: Admission, room: Room, owner: str) -> None:
        self.owner = owner
        self.error: Exception | None = None
        """Why it was ended before it was done."""
        self._admission = admission
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._counts = True
        room.add(self)

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
        return Visit(self._admission, self._room, self.owner)

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
            self._room.remove(self)
            self._admission.left()
