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

from dragoman.engines.protocol import BACKGROUND_PRIORITY, background_owner, is_background
from dragoman.errors import TemplateBudgetExceeded

# The order of answers that the engine has no capacity for yet.
#
# One answer needs one permit, so a request with several answers needs several: it begins as many as there are
# permits for, and the rest later. Permits are shared equally between the keys with work, one by one:
#
# - A permit goes to the key with the fewest running answers, including known ones on other servers of the
#   model. A key with long answers holds its permits for longer, and gets no others.
# - A key below its equal share is admitted although all permits are taken, as far as `most` allows: it does
#   not wait for the long answers of another key.
# - Within a key, lower priorities go first, then earlier arrivals. Priorities mean nothing between keys.
# - Background work (`background_cancel`: the lines of batches) gets the permits that are left, shared in the
#   same way. When a foreground request needs a permit, the latest background work is preempted and queues
# again.
#
# Engines order jobs themselves, by the priority of a job. With several keys, that priority is a fair order
# (`Ticket.order`): the virtual time at which an answer would be done if every key were served an equal number
# of them. It grows with every answer that begins, so no answer waits forever behind later ones.

logger = logging.getLogger("dragoman.turns")

background_cancel: ContextVar[Callable[[], None] | None] = ContextVar("behind", default=None)
"""Set for background work (batch lines): the callback that cancels it when its permit is needed.

Background answers are not cached for continuation.
"""

Begin: TypeAlias = Callable[[int], None]
SMOOTHING = 0.2
"""The weight of the latest interval in the pace."""


def _begin_nothing(permits: int) -> None:
    """Replaces `begin` of a ticket that was withdrawn, so that it references no turn."""


def _end_nothing() -> None:
    """Replaces `step_back` of a ticket that was withdrawn."""


def _in_context(context: Context, begin: Begin) -> Begin:
    return lambda permits: context.run(begin, permits)


class Ticket:
    """A request for `weight` permits. `begin(n)` is called until all are granted, possibly several times.

    `EngineQueue.release` returns some; `EngineQueue.remove` returns all and withdraws the ticket, at any
    time. `turn` is for monitoring.
    """

    __slots__ = (
        "granted",
        "is_closed",
        "on_grant",
        "on_preempt",
        "order",
        "owner",
        "pending",
        "sort_key",
        "turn",
    )

    def __init__(
        self, begin: Begin, owner: str = "", priority: int = 0, weight: int = 1, work: Any = None
    ) -> None:
        self.on_grant, self.turn = begin, work
        self.on_preempt = background_cancel.get()
        """For background work: cancels it."""
        self.owner = owner if self.on_preempt is None else background_owner(owner)
        self.pending = weight
        """Permits that it still waits for."""
        self.granted = 0
        self.order: int | None = None
        """The fair order for the engine if there are several keys; None until the first permit."""
        self.sort_key = (priority, 0)
        self.is_closed = False

    @property
    def is_started(self) -> bool:
        return self.order is not None


TokenMeter: TypeAlias = Callable[[str, int, int | None], Callable[[int], None] | None]
"""Reserves tokens of a key's budget, for the prompt and at most for the answers, if a limit is known.

Raises if the budget is too small. The returned callback is called with the tokens actually used.
"""


class EngineQueue:
    """Limits concurrent answers to `capacity`, or to `most` while a key has less than its share.

    `has_many_keys`: several keys may send requests, so the engine gets the fair order instead of a client's
    priority. `spare`: permits that background work may hold, if the engine cannot preempt it.
    """

    def __init__(
        self, permits: int, most: int | None = None, *, several: bool = True, spare: int | None = None
    ) -> None:
        self.capacity = permits
        self.meter: TokenMeter | None = None
        self._spare = min(spare or permits, permits)
        self._background: dict[Ticket, None] = {}
        """Background tickets with permits, the latest at the end."""
        self._leaving: set[Ticket] = set()
        """Tickets that were preempted and have not left yet."""
        self._burst_capacity = most or permits
        self.has_many_keys = several
        self.elsewhere: Mapping[str, int] = {}
        self.running = 0
        self.tickets: dict[Ticket, None] = {}
        self.waiting = 0
        """Tickets that wait for permits."""
        self.pace = 0.0
        """Seconds between two permits that become free while others wait."""
        self.running_by_key: Counter[str] = Counter()
        # Waiting tickets by key, least recently served key first; those of a key in the order of
        # `Ticket.sort_key`.
        self._waiting: dict[str, list[Ticket]] = {}
        self._arrivals = count()
        self._serving = False
        self._served_at: float | None = None
        self._now = 0
        """Virtual time of the latest answer that the engine has started to generate."""
        self._latest: dict[str, int] = {}
        """Virtual time of each key's latest answer."""

    def submit(self, ticket: Ticket) -> Ticket:
        """Request permits. `begin` is called at once if there are any, and may raise; otherwise later, from
        the loop.
        """
        ticket.sort_key = (ticket.sort_key[0], next(self._arrivals))
        self.tickets[ticket] = None
        if self._background and ticket.on_preempt is None:
            self._preempt_background(ticket.pending)
        room = self.capacity if ticket.on_preempt is None else self._spare
        if not self.waiting and self.running + ticket.pending <= room:
            # The usual case: no ticket waits, and there are permits for all of it.
            mine = ticket.pending
            self._grant(ticket, mine)
        else:
            # Another request's task may grant the permits later, so the ticket keeps its own context.
            ticket.on_grant = _in_context(copy_context(), ticket.on_grant)
            insort(self._waiting.setdefault(ticket.owner, []), ticket, key=attrgetter("sort_key"))
            self.waiting += 1
            granted = self._grant_next()
            mine = granted.pop(ticket, 0)
            self._begin(granted)
        if mine:
            try:
                ticket.on_grant(mine)
            except BaseException:
                self.remove(ticket)
                raise
        return ticket

    def priority(self, ticket: Ticket) -> int:
        """Return the priority by which the engine may order the ticket's jobs."""
        order = (ticket.order or 0) if self.has_many_keys else ticket.sort_key[0]
        return order if ticket.on_preempt is None else BACKGROUND_PRIORITY + order

    def mark_started(self, ticket: Ticket) -> None:
        """Note that the engine has started to generate an answer; the virtual time of later ones starts from
        there.
        """
        self._now = max(self._now, ticket.order or 0)

    def release(self, ticket: Ticket, permits: int = 1) -> None:
        """Return permits whose answers are done."""
        permits = min(permits, ticket.granted)
        ticket.granted -= permits
        self.running -= permits
        self.running_by_key[ticket.owner] -= permits
        if not self.running_by_key[ticket.owner]:
            self.running_by_key.pop(ticket.owner)
            self._forget(ticket.owner)
        self._serve_soon()

    def remove(self, ticket: Ticket) -> None:
        """Withdraw a ticket and return its permits. Idempotent."""
        if ticket.is_closed:
            return
        ticket.is_closed, ticket.turn = True, None
        self.tickets.pop(ticket, None)
        if ticket.pending:
            self._take_out(ticket)
        self._background.pop(ticket, None)
        self._leaving.discard(ticket)
        self.release(ticket, ticket.granted)
        ticket.on_grant = _begin_nothing
        ticket.on_preempt = ticket.on_preempt and _end_nothing

    @asynccontextmanager
    async def acquire(self, owner: str = "") -> AsyncIterator[None]:
        """Hold one permit inside the block; waits until it is granted."""
        begun = asyncio.get_running_loop().create_future()

        def begin(_: int) -> None:
            # A caller that was cancelled meanwhile is about to return the permit.
            if not begun.done():
                begun.set_result(None)

        ticket = self.submit(Ticket(begin, owner))
        try:
            await begun
            self.mark_started(ticket)
            yield
        finally:
            self.remove(ticket)

    def _serve_soon(self) -> None:
        # Deferred: permits become free during an engine step, when engines do not expect new jobs.
        if self.waiting and not self._serving:
            self._serving = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._serving = False
        self._begin(self._grant_next())
        if not self.waiting:
            self._served_at = None

    def _begin(self, granted: dict[Ticket, int]) -> None:
        for ticket, permits in granted.items():
            self._keep_pace()
            try:
                ticket.on_grant(permits)
            except Exception:
                # The other tickets still get their permits.
                logger.exception("A queued request could not begin")
                self.remove(ticket)

    def _grant_next(self) -> dict[Ticket, int]:
        """Grant free permits one by one, each to the key with the fewest; return the new permits per
        ticket.
        """
        granted: Counter[Ticket] = Counter()
        present = {owner for owner in (*self._waiting, *self.running_by_key) if not is_background(owner)}
        share = max(1, self.capacity // len(present or {""}))
        turns, others = count(), self.elsewhere
        fewest = [
            (
                is_background(owner),
                self.running_by_key.get(owner, 0) + others.get(owner, 0),
                next(turns),
                owner,
            )
            for owner in self._waiting
        ]
        heapq.heapify(fewest)
        while fewest and self._has_room(fewest[0][0], self.running_by_key.get(fewest[0][3], 0) < share):
            last, at_work, _, owner = fewest[0]
            ticket = self._waiting[owner][0]
            self._grant(ticket, 1)
            granted[ticket] += 1
            if not ticket.pending:
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
        return self.running < (self._burst_capacity if below_its_share else self.capacity)

    def _preempt_background(self, wanted: int) -> None:
        """Preempt the latest background work until `wanted` permits are available."""
        ahead = (mine for owner, mine in self._waiting.items() if not is_background(owner))
        wanted += sum(ticket.pending for mine in ahead for ticket in mine)
        needed = self.running + wanted - self._spare - sum(ticket.granted for ticket in self._leaving)
        while needed > 0 and self._background:
            ticket, _ = self._background.popitem()
            needed -= ticket.granted
            self._leaving.add(ticket)
            if ticket.on_preempt is not None:
                ticket.on_preempt()

    def _grant(self, ticket: Ticket, permits: int) -> None:
        owner = ticket.owner
        if ticket.on_preempt is not None:
            self._background[ticket] = None
        ticket.pending -= permits
        ticket.granted += permits
        self.running += permits
        self.running_by_key[owner] += permits
        ticket.order = self._latest[owner] = max(self._now, self._latest.get(owner, 0)) + permits

    def _take_out(self, ticket: Ticket) -> None:
        self.waiting -= 1
        mine = self._waiting[ticket.owner]
        del mine[bisect_left(mine, ticket.sort_key, key=attrgetter("sort_key"))]
        if not mine:
            del self._waiting[ticket.owner]
            self._forget(ticket.owner)

    def _forget(self, owner: str) -> None:
        if owner not in self._waiting and owner not in self.running_by_key:
            self._latest.pop(owner, None)

    def _keep_pace(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._served_at is not None:
            interval = now - self._served_at
            self.pace = self.pace + SMOOTHING * (interval - self.pace) if self.pace else interval
        self._served_at = now


# Threads for work that would block the event loop, shared fairly between keys.
#
# There are few threads, because they all compete with the event loop for the interpreter lock. Work without a
# thread waits, and the event loop picks the next one:
#
# - Among keys, the one with the fewest running works, then the one that has used the least time. No key has
#   more than half of the threads, so no key waits for another's long works.
# - Within a key, work that an answer waits for goes before inspection (`/tokenize` and the like). Inspection
#   has at most half of the threads, and one thread per key. While other keys wait for answers, that thread
#   rests after each work for as long as it took: an embedded engine computes on the same processors.
# - Otherwise smaller work first, if it did not come much later: the bigger a work is, the later it counts as
#   having come.
#
# Admission limits how much may wait: everything here belongs to an admitted request.


R = TypeVar("R")

OFFLOAD_BYTES = 32 * 1024
"""Work on more bytes than this runs in a thread, so that the tokens of other requests keep flowing."""
THREADS = 4
OF_ONE_KEY = THREADS // 2
LOOKING = THREADS // 2
LOOKING_OF_ONE_KEY = 1
BYTES_A_SECOND = 4 * 1024 * 1024
"""Extra bytes of size that count like one second of later arrival."""


class Offloader(Protocol):
    """Runs work on `size` bytes, in a thread if it is large."""

    def __call__(self, size: int, work: Callable[[], R], /) -> Awaitable[R]: ...


class _WorkItem(Struct, eq=False):
    owner: str
    call: Callable[[], Any] | None
    """None once it has begun, or its caller is gone."""
    low_priority: bool
    result: "asyncio.Future[Any]"


Waiting: TypeAlias = list[tuple[float, int, _WorkItem]]


class _KeyState(Struct):
    """The running and waiting work of one key."""

    spent: float
    """Seconds of thread time, starting from the lowest value of the other keys."""
    running: int = 0
    looking: int = 0
    """Running inspection work, resting time included."""
    plans: Waiting = field(default_factory=list)
    low_priority: Waiting = field(default_factory=list)


class WorkerPool:
    """Worker threads: `await workers.run(owner, size, work)` returns `work()`; small work runs at once."""

    def __init__(self) -> None:
        self._keys: dict[str, _KeyState] = {}
        self._running = 0
        self._looking = 0
        self._waiting = 0
        self._pace = 0.0
        """Average seconds per work."""
        self._numbers = count()
        self._pool: ThreadPoolExecutor | None = None
        self._always = False
        self.has_waiting_others: Callable[[str], bool] = lambda owner: False
        """Whether answers are being generated for keys other than this one."""

    @property
    def delay(self) -> float:
        """Estimated seconds until everything that waits now has run."""
        return self._pace * (self._waiting + 1) / OF_ONE_KEY

    def should_offload(self, size: int) -> bool:
        """Whether work on so many bytes runs in a thread."""
        return size > OFFLOAD_BYTES or self._always

    async def run(
        self,
        owner: str,
        size: int,
        call: Callable[[], R],
        *,
        always_offload: bool = False,
        low_priority: bool = False,
    ) -> R:
        """Run `call`. `owner` is the hashed API key, `size` the number of bytes; `looks`: no answer waits for
        it.

        Work that is `slow` always gets a thread; so does all work once a template has blocked the event
        loop.
        """
        if always_offload or self.should_offload(size):
            # Background work comes after work that a foreground answer waits for.
            return await self._in_thread(
                owner, size, call, low_priority or background_cancel.get() is not None
            )
        try:
            return call()
        except TemplateBudgetExceeded:
            self._always = True
            raise

    async def _in_thread(self, owner: str, size: int, call: Callable[[], R], low_priority: bool) -> R:
        loop = asyncio.get_running_loop()
        work = _WorkItem(owner, call, low_priority, loop.create_future())
        if owner not in self._keys:
            self._keys[owner] = _KeyState(min((key.spent for key in self._keys.values()), default=0.0))
        key = self._keys[owner]
        position = (loop.time() + size / BYTES_A_SECOND, next(self._numbers), work)
        heapq.heappush(key.low_priority if low_priority else key.plans, position)
        self._waiting += 1
        self._serve()
        try:
            result: R = await work.result
        finally:
            # A cancelled caller leaves its place in the queue, but frees the request body.
            work.call = None
        return result

    async def close(self) -> None:
        """End the threads and return when they have. Waiting work is dropped; later work gets new threads."""
        for key in self._keys.values():
            for _, _, work in (*key.plans, *key.low_priority):
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

    def _next(self) -> _KeyState | None:
        may = [key for key in self._keys.values() if self._ready(key)]
        return min(may, key=lambda key: (key.running, key.spent), default=None)

    def _ready(self, key: _KeyState) -> Waiting:
        """Return the queue of this key that may start its next work, or an empty list."""
        if key.running >= OF_ONE_KEY:
            return []
        if key.plans:
            return key.plans
        may_look = self._looking < LOOKING and key.looking < LOOKING_OF_ONE_KEY
        return key.low_priority if may_look else []

    def _begin(self, key: _KeyState, work: _WorkItem) -> None:
        assert work.call is not None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "dragoman-work")
        self._running += 1
        key.running += 1
        if work.low_priority:
            self._looking += 1
            key.looking += 1
        running = asyncio.get_running_loop().run_in_executor(self._pool, work.call)
        # Not awaited by the caller: if the caller is cancelled, the thread still runs.
        running.add_done_callback(partial(self._end, work, time.perf_counter()))

    def _end(self, work: _WorkItem, began: float, ended: "asyncio.Future[Any]") -> None:
        seconds, key = time.perf_counter() - began, self._keys[work.owner]
        self._pace = self._pace + SMOOTHING * (seconds - self._pace) if self._pace else seconds
        key.spent += seconds
        self._running -= 1
        key.running -= 1
        if work.low_priority:
            self._looking -= 1
            rest = seconds if self.has_waiting_others(work.owner) else 0.0
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
        if not (key.running or key.looking or key.plans or key.low_priority):
            del self._keys[owner]
