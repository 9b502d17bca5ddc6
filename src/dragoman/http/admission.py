"""Admission, byte budgets, access log and metrics.

Requests are admitted before their body is read, so rejecting one is cheap. The engine work of an admitted
request waits in an `EngineQueue`. Requests that do not use the engine (tokenizing, rendering, stored objects)
have a limit of their own and cannot crowd out generation.
"""

import asyncio
import collections
import logging
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import Any, Literal, TypeAlias

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge

from dragoman import tracing
from dragoman.engines.protocol import Engine, ModelCard
from dragoman.errors import DeadlineExceeded, DragomanError, Overloaded, ServerFull, Unavailable
from dragoman.models.loaded import make_queue
from dragoman.settings import Settings
from dragoman.turns.adapters import AdapterShelf
from dragoman.turns.queue import EngineQueue, Meter, Workers

# The access log, and metrics, which `http/metrics.py` exports for Prometheus.
#
# Metrics of answers are plain numbers: only the event loop updates and reads them. They cost nothing per
# token, and little per request.


SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
COUNTS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
TOKENS = ("prompt_tokens", "cached_tokens", "restored_tokens", "completion_tokens")
FINISHES = ("stop", "length", "error", "disconnect")


class Spread:
    """A histogram: counts of numbers between bounds, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, number: float) -> None:
        self.counts[bisect_left(self.bounds, number)] += 1
        self.total += number


class ModelFigures:
    """Metrics of the answers of one model, under its requested name."""

    def __init__(self) -> None:
        self.tokens: collections.Counter[str] = collections.Counter()
        self.finishes: collections.Counter[str] = collections.Counter()
        self.queue, self.first, self.prefill, self.decode, self.between, self.whole = (
            Spread(SECONDS) for _ in range(6)
        )
        self.prompt, self.answer = Spread(COUNTS), Spread(COUNTS)

    def add(self, facts: dict[str, Any], seconds: float) -> None:
        for name in TOKENS:
            self.tokens[name] += facts.get(name, 0)
        for reason in facts.get("finish", "").split(","):
            if reason in FINISHES:
                self.finishes[reason] += 1
        if "completion_tokens" not in facts:
            return
        self.whole.add(seconds)
        self.prompt.add(facts["prompt_tokens"])
        self.answer.add(facts["completion_tokens"])
        if "queue_ms" in facts:
            self.queue.add(facts["queue_ms"] / 1000)
        if "ttft_ms" in facts:
            self.first.add(facts["ttft_ms"] / 1000)
            self.prefill.add(max(facts["ttft_ms"] - facts.get("queue_ms", 0), 0) / 1000)
        if rate := facts.get("tokens_per_s"):
            self.between.add(1 / rate)
            self.decode.add((facts["completion_tokens"] - 1) / rate)


class LiveModel(Struct, frozen=True):
    """A loaded model whose state the metrics read when they are scraped."""

    queue: EngineQueue
    engine: Engine
    adapters: AdapterShelf


class Metrics:
    """The metrics of one app; each has a registry, so that two apps in a process do not share metrics."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.in_flight, being = 0, "Requests being served"
        Gauge("dragoman_requests_in_flight", being, registry=registry).set_function(lambda: self.in_flight)
        self.refused = Counter(
            "dragoman_refused", "Rejected requests by reason", ["reason"], registry=registry
        )
        requests = Counter(
            "dragoman_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        # There are few label sets, and looking up a metric each time takes longer than adding to it.
        self._requests = cache(requests.labels)
        self.whole = Spread(SECONDS)
        self.models: defaultdict[str, ModelFigures] = defaultdict(ModelFigures)
        """Metrics by model name in requests; a request for an unknown name counts under the default model's
        name, or not at all."""
        self.live: dict[str, LiveModel] = {}
        """Loaded models by name."""
        self.listeners: list[Callable[[str, dict[str, Any], float], None]] = []
        """Other listeners for finished requests: called with route, facts and seconds."""

    def observe(self, route: str, status: int, facts: dict[str, Any], seconds: float) -> None:
        self._requests(route, str(status)).inc()
        self.whole.add(seconds)
        if "prompt_tokens" in facts or "finish" in facts:
            self.models[facts.get("model") or next(iter(self.live), "")].add(facts, seconds)
        for listen in self.listeners:
            listen(route, facts, seconds)


access = logging.getLogger("dragoman.access")


class Journal:
    def __init__(self, traces: tracing.Tracing | None = None) -> None:
        self.metrics = Metrics()
        self.tracing = traces

    def record(self, route: str, facts: dict[str, Any], seconds: float) -> None:
        """Record a request; `facts` have a method, a path and a status, `route` is a declared path."""
        self.metrics.observe(route, facts["status"], facts, seconds)
        if not access.isEnabledFor(logging.INFO):
            return
        line = {**facts, "duration_ms": round(seconds * 1000, 1)}
        access.info("%s %s %d", facts["method"], facts["path"], facts["status"], extra={"request": line})

    @contextmanager
    def work(self, method: str, path: str) -> Iterator[dict[str, Any]]:
        """Record work that is not an HTTP request; the block adds the facts."""
        began = time.monotonic()
        facts: dict[str, Any] = {"method": method, "path": path, "status": 200}
        self.metrics.in_flight += 1
        with tracing.traced(self.tracing, f"{method} {path}", facts, tracing.current.get()):
            try:
                yield facts
            except DragomanError as error:
                facts |= {"status": error.status, "error": error.message, "code": error.code}
                raise
            except asyncio.CancelledError:
                facts.setdefault("finish", "cancelled")
                raise
            finally:
                self.metrics.in_flight -= 1
                self.record(f"{method} {path}", facts, time.monotonic() - began)


# Byte budgets: memory reserved for all clients together, and the share of one key.
#
# One incomplete body or unread reply is harmless, but a thousand could exhaust the machine's memory. Bytes
# above a small free amount are therefore counted, and a request that exceeds the budget is rejected at once:
# waiting while holding bytes could deadlock with other requests that do the same.


FREE_BYTES = 64 * 1024
"""Bytes that each request may hold uncounted: small requests are served however many large ones there are."""
LOADED_AT_ONCE = 2
"""Stored objects that one key may load at once; each is counted before the next is loaded."""


class Budget:
    """A limit of bytes for all requests; `budget.of(owner)` is the share of one request."""

    def __init__(self, most: int, keys: int, what: str) -> None:
        self.most = most
        self.share_between(keys)
        self.held = 0
        self._what = what
        self._of_key: collections.Counter[str] = collections.Counter()

    def share_between(self, keys: int) -> None:
        """Set the limit per key: with several keys, no key can use the whole budget."""
        self.most_of_key = self.most if keys < 2 else -(-self.most // 2)

    def of(self, owner: str) -> "Holding":
        return Holding(self, owner)

    def check(self, owner: str, more: int = 1, own: int = 0) -> None:
        """Raise if `more` bytes exceed the budget; `own` bytes are those that the request already holds.

        A request that is alone may use any amount: otherwise what is larger than the budget could never be
        served.
        """
        mine = self._of_key[owner]
        if mine > own and mine + more > self.most_of_key and self.most_of_key < self.most:
            raise Overloaded(
                f"{self._what} of this API key use {mine} of {self.most_of_key} bytes; retry when a request "
                "finishes."
            )
        if self.held > own and self.held + more > self.most:
            raise Unavailable(f"{self._what} use {self.held} of {self.most} bytes; retry soon.")

    def add(self, owner: str, count: int) -> None:
        self.held += count
        self._of_key[owner] += count
        if not self._of_key[owner]:
            del self._of_key[owner]


class Replies(Budget):
    """The budget of replies. The size of a stored object is known only after loading, so few are loaded at
    once."""

    def __init__(self, most: int, keys: int) -> None:
        super().__init__(most, keys, "Unread replies")
        self._loading: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(LOADED_AT_ONCE)
        )

    def loading(self, owner: str) -> asyncio.Semaphore:
        """Return the semaphore for loading stored objects: a key's next load waits until this is counted."""
        return self._loading[owner]


class Holding:
    """The bytes that one request holds, which may grow and shrink; release them with `end` or as a context
    manager."""

    def __init__(self, budget: Budget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._counted = 0

    def be(self, size: int, *, checked: bool = True) -> None:
        """Set the number of held bytes; raise and change nothing if they exceed the budget."""
        more = (size if size > FREE_BYTES else 0) - self._counted
        if more > 0 and checked:
            self._budget.check(self._owner, more, self._counted)
        if more:
            self._budget.add(self._owner, more)
            self._counted += more

    def end(self) -> None:
        if self._counted:
            self.be(0)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()


# Admission: which requests are accepted, until when, and a single way to end them.


LONGEST_RETRY_S = 30
PATIENCE_S = 0.4
"""Seconds that ended requests have to send their error."""


VisitKind: TypeAlias = Literal["asks", "looks", "sends"]
"""`asks` uses the engine, `looks` does not, `sends` uploads a file and lasts as long as the network needs."""


class Room:
    """A limit of concurrent requests; above it, only keys with less than an equal share are admitted."""

    def __init__(self, most: int, most_of_key: int, delay: Callable[[], float]) -> None:
        self.most = most
        self.most_of_key = most_of_key
        self.delay = delay
        """Returns an estimate of the seconds until a request can be admitted."""
        self.inside: set[Visit] = set()
        self.of_key: collections.Counter[str] = collections.Counter()

    def full_for(self, owner: str) -> bool:
        keys = len(self.of_key) + (owner not in self.of_key)
        return len(self.inside) >= self.most and self.of_key.get(owner, 0) >= max(1, self.most // keys)

    def full_of(self, owner: str) -> bool:
        return bool(owner) and self.of_key.get(owner, 0) >= self.most_of_key

    def limit(self, owner: str) -> int:
        """Return how many requests of this key may be active."""
        return min(self.most, self.most_of_key) if owner else self.most

    def left(self, owner: str) -> int:
        """Return how many more requests of this key would be admitted now."""
        mine, keys = self.of_key.get(owner, 0), len(self.of_key) + (owner not in self.of_key)
        of_all = max(self.most - len(self.inside), max(1, self.most // keys) - mine)
        return max(0, min(of_all, self.most_of_key - mine) if owner else of_all)

    def has_others(self, owner: str) -> bool:
        """Return whether another key has active requests."""
        return any(key != owner for key in self.of_key)

    def add(self, visit: "Visit") -> None:
        self.inside.add(visit)
        self.of_key[visit.owner] += 1

    def remove(self, visit: "Visit") -> None:
        self.inside.discard(visit)
        self.of_key[visit.owner] -= 1
        if not self.of_key[visit.owner]:
            self.of_key.pop(visit.owner)


class Admission:
    """Admits requests, and keeps the engine queues and the limits of each kind of request."""

    def __init__(self, settings: Settings, metrics: Metrics, workers: Workers, *, keys: int = 1) -> None:
        self._limits = limits = settings.limits
        self._keys = keys
        self._queues: list[EngineQueue] = []
        self._meter: Meter | None = None
        self.timeout = settings.request_timeout
        self.draining = False
        asking = Room(limits.queue, limits.queue, self._delay)
        self.rooms: dict[VisitKind, Room] = {
            "asks": asking,
            "looks": Room(limits.looking, limits.looking, lambda: workers.delay),
            "sends": Room(limits.uploads, limits.uploads, lambda: 1.0),
        }
        self.share_between(keys)
        workers.others_wait = asking.has_others
        self._emptied: asyncio.Future[None] | None = None
        self._refused = metrics.refused

    def open_queue(self, card: ModelCard) -> EngineQueue:
        """Open the queue of a loaded model; the limit of requests grows by the model's capacity."""
        queue = make_queue(card, self._limits.in_flight, several=self._keys > 1)
        queue.meter = self._meter
        self._queues.append(queue)
        self.share_between(self._keys)
        return queue

    def set_meter(self, meter: Meter | None) -> None:
        """Set the meter that counts the tokens of all answers."""
        self._meter = meter
        for queue in self._queues:
            queue.meter = meter

    def close_queue(self, queue: EngineQueue) -> None:
        self._queues.remove(queue)
        self.share_between(self._keys)

    @property
    def places(self) -> int:
        return sum(queue.places for queue in self._queues)

    def _delay(self) -> float:
        return max((queue.pace * (queue.waiting + 1) for queue in self._queues), default=1.0)

    def share_between(self, keys: int) -> None:
        """Set the limits per key: half of each with several keys, unless `limits.per_key` sets another."""
        self._keys = keys
        self.rooms["asks"].most = self.places + self._limits.queue
        for queue in self._queues:
            queue.several = keys > 1
        for kind, room in self.rooms.items():
            share = room.most if keys < 2 else -(-room.most // 2)
            wanted = self._limits.per_key or share
            room.most_of_key = wanted if kind == "asks" else min(wanted, share)

    @property
    def inside(self) -> int:
        return sum(len(room.inside) for room in self.rooms.values())

    def admitted(self, owner: str, kind: VisitKind = "asks") -> "Visit":
        """Admit a request, or raise if a limit is reached."""
        if self.draining:
            self._refused.labels("stopping").inc()
        self.check()
        room = self.rooms[kind]
        if room.full_for(owner):
            raise self._refusal(
                room, "queue", f"The server has {room.most} requests running or queued; retry soon."
            )
        if room.full_of(owner):
            most = room.most_of_key
            message = f"This API key already has {most} requests running or queued; retry when one finishes."
            raise self._refusal(room, "key", message)
        return Visit(self, room, owner)

    def rates(self, owner: str, kind: VisitKind) -> dict[bytes, bytes]:
        """Return OpenAI's rate-limit headers for a request that is about to be admitted.

        The limits are on concurrent requests: one that ends admits another, at any rate.
        """
        room = self.rooms[kind]
        left = room.left(owner)
        return {
            b"x-ratelimit-limit-requests": b"%d" % room.limit(owner),
            b"x-ratelimit-remaining-requests": b"%d" % max(left - 1, 0),
            b"x-ratelimit-reset-requests": b"%ds" % (0 if left > 1 else _wait(room)),
        }

    def check(self) -> None:
        """Raise if the server is stopping."""
        if self.draining:
            raise Unavailable("The server is stopping; retry soon.", code="stopping")

    def _refusal(self, room: Room, reason: str, message: str) -> Overloaded:
        self._refused.labels(reason).inc()
        kind = ServerFull if reason == "queue" else Overloaded
        return kind(message, retry_after=_wait(room))

    async def end_all(self) -> None:
        """Stop admitting requests, and end all active ones, which get a moment to send their error."""
        self.draining = True
        for visit in [visit for room in self.rooms.values() for visit in room.inside]:
            visit.end(Unavailable("The server stopped before the answer was complete; retry soon."))
        await self.emptied(PATIENCE_S)

    async def emptied(self, most: float) -> None:
        """Wait until no request is active, for at most this many seconds."""
        if self.inside:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._emptied}, timeout=most)

    def left(self) -> None:
        if self._emptied is not None and not self.inside and not self._emptied.done():
            self._emptied.set_result(None)


def _wait(room: Room) -> int:
    """Return the seconds after which a client should retry."""
    return max(1, min(math.ceil(room.delay()), LONGEST_RETRY_S))


class Visit:
    """An active request, used as a context manager: what ends it early cancels the task and is raised on
    exit.

    Deadline and shutdown work this way: for the task each is one cancellation, whose scopes abort the jobs.
    """

    def __init__(self, admission: Admission, room: Room, owner: str) -> None:
        self.owner = owner
        self.error: Exception | None = None
        """Why the request was ended early."""
        self._admission = admission
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._counts = True
        room.add(self)

    def within(self, seconds: float | None) -> None:
        """Set the deadline, in seconds since the request began; None uses the timeout of the settings."""
        if (seconds := seconds or self._admission.timeout) is not None:
            message = (
                f"The answer was not complete within the timeout of {seconds:g} seconds; raise the timeout"
                " or lower max_tokens."
            )
            when = self._began + seconds
            self._timer = self._loop.call_at(when, lambda: self.end(DeadlineExceeded(message)))

    def end(self, error: Exception) -> None:
        if self.error is None and self._counts:
            self.error = error
            if self._task is not None:
                self._task.cancel()

    def handed_on(self) -> "Visit":
        """Hand over the permit to work that continues in another task."""
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
        # As in asyncio.timeout: a cancellation by other code takes precedence.
        if self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self.error from None

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._counts:
            self._counts = False
            self._room.remove(self)
            self._admission.left()
