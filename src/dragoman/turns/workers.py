"""Threads for what would hold up the event loop, shared out fairly between the keys that have such work.

The threads are few, because all of them want the interpreter that the loop wants too. What there is no thread
for waits, and whose turn it is the loop decides:

- Of several keys the one with the fewest works at that moment, and among equals the one that has had the
  least time. None may have more than half of the threads: nobody waits until another's long works are done.
- Of one key, what an answer waits for goes before what only looks (`/tokenize` and its like). Looking has
  half of the threads at most, and of one key one. While others wait for answers, that one rests after each
  work for as long as it took: the processors are what an embedded engine computes with.
- Among those the smaller first, where it did not come much later: a work counts as if it had come the later,
  the bigger it is.

How much may wait is the door's to say: everything here belongs to a request that was let in.
"""

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, Protocol, TypeAlias, TypeVar

from msgspec import Struct, field

from dragoman.errors import EndlessTemplate

R = TypeVar("R")

MUCH = 32 * 1024
"""What is about more bytes than these is done in a thread, so that the others' tokens keep flowing."""
THREADS = 4
OF_ONE_KEY = THREADS // 2
LOOKING = THREADS // 2
LOOKING_OF_ONE_KEY = 1
BYTES_A_SECOND = 4 * 1024 * 1024
"""A work that is bigger by so much goes first only if it came a second earlier."""
SMOOTHING = 0.2
"""How much the latest work counts in the pace."""


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
            return await self._in_thread(owner, size, call, looks)
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
            # Whoever left keeps a place in the line, but not a body.
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
            _, _, work = heapq.heappop(self._line(key))
            self._waiting -= 1
            if work.result.done():
                self._forget(work.owner)
            else:
                self._begin(key, work)

    def _next(self) -> _Key | None:
        may = [key for key in self._keys.values() if self._line(key)]
        return min(may, key=lambda key: (key.running, key.spent), default=None)

    def _line(self, key: _Key) -> Waiting:
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
            asyncio.get_running_loop().call_later(rest, self._rested, work.owner)
        self._forget(work.owner)
        error = ended.exception()
        if work.result.done():
            pass
        elif error is None:
            work.result.set_result(ended.result())
        else:
            work.result.set_exception(error)
        self._serve()

    def _rested(self, owner: str) -> None:
        self._keys[owner].looking -= 1
        self._forget(owner)
        self._serve()

    def _forget(self, owner: str) -> None:
        key = self._keys[owner]
        if not (key.running or key.looking or key.plans or key.looks):
            del self._keys[owner]
