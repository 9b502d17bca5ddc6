"""Two queues, both fair between keys: answers that wait for the engine, and work that waits for a thread."""

import asyncio
import heapq
import logging
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, Protocol, TypeAlias, TypeVar

from msgspec import Struct, field

from dragoman.engines.protocol import BEHIND, behind_owner, is_behind
from dragoman.errors import EndlessTemplate

# Who is computed next: what the engine has no place for yet waits here.
#
# A place is for one answer, so a request for several needs several: it begins as many as there are places
# for, and the rest when their time comes. Places are shared out equally between the keys that have work,
# one by one:
#
# - A place goes to the key with the fewest answers at work, those at other servers of the model included,
#   as far as they are known. So a key with long answers holds its places for longer, and gets no others.
# - A key with less than its equal share is let in though all places are taken, as far as `most` allows: it
#   does not wait until the long answers of another are done.
# - Of one key, lower priorities go first, and among equals the first to come. Between keys they mean nothing.
# - Work that nobody waits for (`behind`: the lines of batches) has the places that are left, shared out in
#   the same way. Where a place is needed for others, the last of it steps back, and asks again.
#
# Engines have an order of their own, by the priority of a job. Where several keys ask, they are given one
# that is fair (`Ticket.order`): the virtual time at which an answer would be done if every key were served
# an equal number of them. It grows with every answer that begins, so nothing waits for ever behind what
# comes later.

logger = logging.getLogger("dragoman.turns")

behind: ContextVar[Callable[[], None] | None] = ContextVar("behind", default=None)
"""Set where something is done that nobody waits for: what ends it when its place is needed.

Nobody goes on from it, either: what is remembered of answers is for those of people.
"""

Begin: TypeAlias = Callable[[int], None]
SMOOTHING = 0.2
"""How much the latest interval counts in the pace."""


def _begin_nothing(places: int) -> None:
    """Of who has left: a ticket holds nobody then."""


def _end_nothing() -> None:
    """The same of what would step back."""


def _in_context(context: Context, begin: Begin) -> Begin:
    return lambda places: context.run(begin, places)


class Ticket:
    """`weight` places that are asked for; `begin` is told how many of them there are now, until it has all.

    Given back one by one with `EngineQueue.give_back`, or all at once with `EngineQueue.leave`, be it their
    time or not. `work` is for those who look.
    """

    __slots__ = ("begin", "held", "left", "order", "owner", "place", "step_back", "wanted", "work")

    def __init__(
        self, begin: Begin, owner: str = "", priority: int = 0, weight: int = 1, work: Any = None
    ) -> None:
        self.begin, self.work = begin, work
        self.step_back = behind.get()
        """Of what stands behind all others."""
        self.owner = owner if self.step_back is None else behind_owner(owner)
        self.wanted = weight
        """Places that it still waits for."""
        self.held = 0
        self.order: int | None = None
        """What an engine may go by when several keys ask; None while nothing has begun."""
        self.place = (priority, 0)
        self.left = False

    @property
    def begun(self) -> bool:
        return self.order is not None


Meter: TypeAlias = Callable[[str, int, int | None], Callable[[int], None] | None]
"""Sets tokens of a key's budget aside: those of a prompt, and of the answers at most, if that is said.

Raises where so many are not left. What it gives is told in the end how many were taken."""


class EngineQueue:
    """`places` answers are at work at the same time, or up to `most` where a key has less than its share.

    `several`: more than one key may ask, so that what one says of its own priority is not for the engine.
    `spare`: how many of all may be work that nobody waits for, where the engine does not make way for others
    by itself.
    """

    def __init__(
        self, places: int, most: int | None = None, *, several: bool = True, spare: int | None = None
    ) -> None:
        self.places = places
        self.meter: Meter | None = None
        self._spare = min(spare or places, places)
        self._behind: dict[Ticket, None] = {}
        """Those of such work that have places, the last at the end."""
        self._leaving: set[Ticket] = set()
        """Those that were told to step back, and are about to."""
        self._most = most or places
        self.several = several
        self.elsewhere: Mapping[str, int] = {}
        self.running = 0
        self.asked: dict[Ticket, None] = {}
        self.waiting = 0
        """Tickets that wait for a place, or for more."""
        self.pace = 0.0
        """Seconds from one place that came free to the next, while others waited for it."""
        self.at_work: Counter[str] = Counter()
        # By key, that which was served least lately first; of each in the order of `Ticket.place`.
        self._waiting: dict[str, list[Ticket]] = {}
        self._arrivals = count()
        self._serving = False
        self._served_at: float | None = None
        self._now = 0
        """The virtual time: that of the latest answer which the engine has begun to say."""
        self._latest: dict[str, int] = {}
        """The virtual time of each key's latest answer."""

    def ask(self, ticket: Ticket) -> Ticket:
        """`begin` is called at once if there is a place, and may raise then; else later, from the loop."""
        ticket.place = (ticket.place[0], next(self._arrivals))
        self.asked[ticket] = None
        if self._behind and ticket.step_back is None:
            self._press(ticket.wanted)
        room = self.places if ticket.step_back is None else self._spare
        if not self.waiting and self.running + ticket.wanted <= room:
            # As it mostly is: nobody waits, and there is room for all of it.
            mine = ticket.wanted
            self._grant(ticket, mine)
        else:
            # It begins when others have made room for it, and is not theirs for that.
            ticket.begin = _in_context(copy_context(), ticket.begin)
            insort(self._waiting.setdefault(ticket.owner, []), ticket, key=attrgetter("place"))
            self.waiting += 1
            granted = self._grant_next()
            mine = granted.pop(ticket, 0)
            self._begin(granted)
        if mine:
            try:
                ticket.begin(mine)
            except BaseException:
                self.leave(ticket)
                raise
        return ticket

    def priority(self, ticket: Ticket) -> int:
        """By which an engine may order what it was given."""
        order = (ticket.order or 0) if self.several else ticket.place[0]
        return order if ticket.step_back is None else BEHIND + order

    def served(self, ticket: Ticket) -> None:
        """The engine has begun to say an answer; those that come later are reckoned from there."""
        self._now = max(self._now, ticket.order or 0)

    def give_back(self, ticket: Ticket, places: int = 1) -> None:
        """What it was for is done."""
        places = min(places, ticket.held)
        ticket.held -= places
        self.running -= places
        self.at_work[ticket.owner] -= places
        if not self.at_work[ticket.owner]:
            self.at_work.pop(ticket.owner)
            self._forget(ticket.owner)
        self._serve_soon()

    def leave(self, ticket: Ticket) -> None:
        """Idempotent."""
        if ticket.left:
            return
        ticket.left, ticket.work = True, None
        self.asked.pop(ticket, None)
        if ticket.wanted:
            self._take_out(ticket)
        self._behind.pop(ticket, None)
        self._leaving.discard(ticket)
        self.give_back(ticket, ticket.held)
        ticket.begin = _begin_nothing
        ticket.step_back = ticket.step_back and _end_nothing

    @asynccontextmanager
    async def place(self, owner: str = "") -> AsyncIterator[None]:
        """Inside, a place is held; who has none yet waits to get in."""
        begun = asyncio.get_running_loop().create_future()

        def begin(_: int) -> None:
            # Who has left in the meantime is about to give the place back.
            if not begun.done():
                begun.set_result(None)

        ticket = self.ask(Ticket(begin, owner))
        try:
            await begun
            self.served(ticket)
            yield
        finally:
            self.leave(ticket)

    def _serve_soon(self) -> None:
        # Not at once: a place comes free in the midst of a step, where an engine does not expect new jobs.
        if self.waiting and not self._serving:
            self._serving = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._serving = False
        self._begin(self._grant_next())
        if not self.waiting:
            self._served_at = None

    def _begin(self, granted: dict[Ticket, int]) -> None:
        for ticket, places in granted.items():
            self._keep_pace()
            try:
                ticket.begin(places)
            except Exception:
                # The others wait for their places all the same.
                logger.exception("What had waited could not begin")
                self.leave(ticket)

    def _grant_next(self) -> dict[Ticket, int]:
        """Whose turn it is, and how many places each has now: one after the other, to who has the fewest."""
        granted: Counter[Ticket] = Counter()
        present = {owner for owner in (*self._waiting, *self.at_work) if not is_behind(owner)}
        share = max(1, self.places // len(present or {""}))
        turns, others = count(), self.elsewhere
        fewest = [
            (is_behind(owner), self.at_work.get(owner, 0) + others.get(owner, 0), next(turns), owner)
            for owner in self._waiting
        ]
        heapq.heapify(fewest)
        while fewest and self._has_room(fewest[0][0], self.at_work.get(fewest[0][3], 0) < share):
            last, at_work, _, owner = fewest[0]
            ticket = self._waiting[owner][0]
            self._grant(ticket, 1)
            granted[ticket] += 1
            if not ticket.wanted:
                self._take_out(ticket)
            if owner in self._waiting:
                heapq.heapreplace(fewest, (last, at_work + 1, next(turns), owner))
                self._waiting[owner] = self._waiting.pop(owner)
            else:
                heapq.heappop(fewest)
        return granted

    def _has_room(self, behind: bool, below_its_share: bool) -> bool:
        if behind:
            return self.running < self._spare
        return self.running < (self._most if below_its_share else self.places)

    def _press(self, wanted: int) -> None:
        """So many places are needed: where there are too few, the last that nobody waits for step back."""
        ahead = (mine for owner, mine in self._waiting.items() if not is_behind(owner))
        wanted += sum(ticket.wanted for mine in ahead for ticket in mine)
        needed = self.running + wanted - self._spare - sum(ticket.held for ticket in self._leaving)
        while needed > 0 and self._behind:
            ticket, _ = self._behind.popitem()
            needed -= ticket.held
            self._leaving.add(ticket)
            if ticket.step_back is not None:
                ticket.step_back()

    def _grant(self, ticket: Ticket, places: int) -> None:
        owner = ticket.owner
        if ticket.step_back is not None:
            self._behind[ticket] = None
        ticket.wanted -= places
        ticket.held += places
        self.running += places
        self.at_work[owner] += places
        ticket.order = self._latest[owner] = max(self._now, self._latest.get(owner, 0)) + places

    def _take_out(self, ticket: Ticket) -> None:
        self.waiting -= 1
        mine = self._waiting[ticket.owner]
        del mine[bisect_left(mine, ticket.place, key=attrgetter("place"))]
        if not mine:
            del self._waiting[ticket.owner]
            self._forget(ticket.owner)

    def _forget(self, owner: str) -> None:
        if owner not in self._waiting and owner not in self.at_work:
            self._latest.pop(owner, None)

    def _keep_pace(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._served_at is not None:
            interval = now - self._served_at
            self.pace = self.pace + SMOOTHING * (interval - self.pace) if self.pace else interval
        self._served_at = now


# Threads for what would hold up the event loop, shared out fairly between the keys that have such work.
#
# The threads are few, because all of them want the interpreter that the loop wants too. What there is no
# thread for waits, and whose turn it is the loop decides:
#
# - Of several keys the one with the fewest works at that moment, and among equals the one that has had the
#   least time. None may have more than half of the threads: nobody waits until another's long works are done.
# - Of one key, what an answer waits for goes before what only looks (`/tokenize` and its like). Looking has
#   half of the threads at most, and of one key one. While others wait for answers, that one rests after each
#   work for as long as it took: the processors are what an embedded engine computes with.
# - Among those the smaller first, where it did not come much later: a work counts as if it had come the
#   later, the bigger it is.
#
# How much may wait is the door's to say: everything here belongs to a request that was let in.


R = TypeVar("R")

MUCH = 32 * 1024
"""What is about more bytes than these is done in a thread, so that the others' tokens keep flowing."""
THREADS = 4
OF_ONE_KEY = THREADS // 2
LOOKING = THREADS // 2
LOOKING_OF_ONE_KEY = 1
BYTES_A_SECOND = 4 * 1024 * 1024
"""A work that is bigger by so much goes first only if it came a second earlier."""


class Aside(Protocol):
    """Does work that is about so many bytes, in a thread where those are many."""

    def __call__(self, size: int, work: Callable[[], R], /) -> Awaitable[R]: ...


class _Work(Struct, eq=False):
    owner: str
    call: Callable[[], Any] | None
    """None when it has begun, or nobody waits for it any more."""
    looks: bool
    result: "asyncio.Future[Any]"


Waiting: TypeAlias = list[tuple[float, int, _Work]]


class _Key(Struct):
    """What one key has here."""

    spent: float
    """Seconds of threads, counted on from what the one with the least had when this one came."""
    running: int = 0
    looking: int = 0
    """Works that look, and those that are followed by a rest."""
    plans: Waiting = field(default_factory=list)
    looks: Waiting = field(default_factory=list)


class Workers:
    """`await workers.run(owner, size, work)` gives what `work()` gives; what is small is done at once."""

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}
        self._running = 0
        self._looking = 0
        self._waiting = 0
        self._pace = 0.0
        """Seconds that a work takes."""
        self._numbers = count()
        self._pool: ThreadPoolExecutor | None = None
        self._always = False
        self.others_wait: Callable[[str], bool] = lambda owner: False
        """Whether answers are made for other keys than this."""

    @property
    def delay(self) -> float:
        """Seconds until all that waits now has had its turn, about."""
        return self._pace * (self._waiting + 1) / OF_ONE_KEY

    def needed(self, size: int) -> bool:
        """Whether work about so many bytes is done in a thread."""
        return size > MUCH or self._always

    async def run(
        self, owner: str, size: int, call: Callable[[], R], *, slow: bool = False, looks: bool = False
    ) -> R:
        """`owner` is whose key it is, `size` how many bytes it is about; `looks`: no answer waits for it.

        What is `slow` has a thread whatever its size, and so has all once a template has held up the others.
        """
        if slow or self.needed(size):
            # What nobody waits for comes after what an answer waits for.
            return await self._in_thread(owner, size, call, looks or behind.get() is not None)
        try:
            return call()
        except EndlessTemplate:
            self._always = True
            raise

    async def _in_thread(self, owner: str, size: int, call: Callable[[], R], looks: bool) -> R:
        loop = asyncio.get_running_loop()
        work = _Work(owner, call, looks, loop.create_future())
        if owner not in self._keys:
            self._keys[owner] = _Key(min((key.spent for key in self._keys.values()), default=0.0))
        key = self._keys[owner]
        place = (loop.time() + size / BYTES_A_SECOND, next(self._numbers), work)
        heapq.heappush(key.looks if looks else key.plans, place)
        self._waiting += 1
        self._serve()
        try:
            result: R = await work.result
        finally:
            # Whoever left keeps a place in the queue, but not a body.
            work.call = None
        return result

    async def close(self) -> None:
        """Returns when the threads have ended. What waits is not begun; what comes later has new threads."""
        for key in self._keys.values():
            for _, _, work in (*key.plans, *key.looks):
                work.result.cancel()
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(pool.shutdown)

    def _serve(self) -> None:
        while self._running < THREADS and (key := self._next()) is not None:
            _, _, work = heapq.heappop(self._ready(key))
            self._waiting -= 1
            if work.result.done():
                self._forget(work.owner)
            else:
                self._begin(key, work)

    def _next(self) -> _Key | None:
        may = [key for key in self._keys.values() if self._ready(key)]
        return min(may, key=lambda key: (key.running, key.spent), default=None)

    def _ready(self, key: _Key) -> Waiting:
        """Of what this key has waiting, that of which something may begin."""
        if key.running >= OF_ONE_KEY:
            return []
        if key.plans:
            return key.plans
        may_look = self._looking < LOOKING and key.looking < LOOKING_OF_ONE_KEY
        return key.looks if may_look else []

    def _begin(self, key: _Key, work: _Work) -> None:
        assert work.call is not None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "dragoman-work")
        self._running += 1
        key.running += 1
        if work.looks:
            self._looking += 1
            key.looking += 1
        running = asyncio.get_running_loop().run_in_executor(self._pool, work.call)
        # Not awaited by the one who waits: if that is cancelled, the thread is at work all the same.
        running.add_done_callback(partial(self._end, work, time.perf_counter()))

    def _end(self, work: _Work, began: float, ended: "asyncio.Future[Any]") -> None:
        seconds, key = time.perf_counter() - began, self._keys[work.owner]
        self._pace = self._pace + SMOOTHING * (seconds - self._pace) if self._pace else seconds
        key.spent += seconds
        self._running -= 1
        key.running -= 1
        if work.looks:
            self._looking -= 1
            rest = seconds if self.others_wait(work.owner) else 0.0
            asyncio.get_running_loop().call_later(rest, self._end_rest, work.owner)
        self._forget(work.owner)
        error = ended.exception()
        if work.result.done():
            pass
        elif error is None:
            work.result.set_result(ended.result())
        else:
            work.result.set_exception(error)
        self._serve()

    def _end_rest(self, owner: str) -> None:
        self._keys[owner].looking -= 1
        self._forget(owner)
        self._serve()

    def _forget(self, owner: str) -> None:
        key = self._keys[owner]
        if not (key.running or key.looking or key.plans or key.looks):
            del self._keys[owner]
