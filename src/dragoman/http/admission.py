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
from dragoman.turns.adapters import AdapterRegistry
from dragoman.turns.queue import EngineQueue, TokenMeter, WorkerPool

# The access log, and metrics, which `http/metrics.py` exports for Prometheus.
#
# Metrics of answers are plain numbers: only the event loop updates and reads them. They cost nothing per
# token, and little per request.


SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
COUNTS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
TOKENS = ("prompt_tokens", "cached_tokens", "restored_tokens", "completion_tokens")
FINISHES = ("stop", "length", "error", "disconnect")


class Histogram:
    """A histogram: counts of numbers between bounds, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, number: float) -> None:
        self.counts[bisect_left(self.bounds, number)] += 1
        self.total += number


class ModelMetrics:
    """Metrics of the answers of one model, under its requested name."""

    def __init__(self) -> None:
        self.tokens: collections.Counter[str] = collections.Counter()
        self.finishes: collections.Counter[str] = collections.Counter()
        self.queue, self.first, self.prefill, self.decode, self.between, self.whole = (
            Histogram(SECONDS) for _ in range(6)
        )
        self.prompt, self.answer = Histogram(COUNTS), Histogram(COUNTS)

    def add(self, log_fields: dict[str, Any], seconds: float) -> None:
        for name in TOKENS:
            self.tokens[name] += log_fields.get(name, 0)
        for reason in log_fields.get("finish", "").split(","):
            if reason in FINISHES:
                self.finishes[reason] += 1
        if "completion_tokens" not in log_fields:
            return
        self.whole.add(seconds)
        self.prompt.add(log_fields["prompt_tokens"])
        self.answer.add(log_fields["completion_tokens"])
        if "queue_ms" in log_fields:
            self.queue.add(log_fields["queue_ms"] / 1000)
        if "ttft_ms" in log_fields:
            self.first.add(log_fields["ttft_ms"] / 1000)
            self.prefill.add(max(log_fields["ttft_ms"] - log_fields.get("queue_ms", 0), 0) / 1000)
        if rate := log_fields.get("tokens_per_s"):
            self.between.add(1 / rate)
            self.decode.add((log_fields["completion_tokens"] - 1) / rate)


class LiveModel(Struct, frozen=True):
    """A loaded model whose state the metrics read when they are scraped."""

    queue: EngineQueue
    engine: Engine
    adapters: AdapterRegistry


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
        self.whole = Histogram(SECONDS)
        self.models: defaultdict[str, ModelMetrics] = defaultdict(ModelMetrics)
        """Metrics by model name in requests; a request for an unknown name counts under the default model's
        name, or not at all."""
        self.live_models: dict[str, LiveModel] = {}
        """Loaded models by name."""
        self.listeners: list[Callable[[str, dict[str, Any], float], None]] = []
        """Other listeners for finished requests: called with route, facts and seconds."""

    def observe(self, route: str, status: int, log_fields: dict[str, Any], seconds: float) -> None:
        self._requests(route, str(status)).inc()
        self.whole.add(seconds)
        if "prompt_tokens" in log_fields or "finish" in log_fields:
            self.models[log_fields.get("model") or next(iter(self.live_models), "")].add(log_fields, seconds)
        for listen in self.listeners:
            listen(route, log_fields, seconds)


access = logging.getLogger("dragoman.access")


class RequestRecorder:
    def __init__(self, traces: tracing.Telemetry | None = None) -> None:
        self.metrics = Metrics()
        self.tracing = traces

    def record(self, route: str, log_fields: dict[str, Any], seconds: float) -> None:
        """Record a request; `facts` have a method, a path and a status, `route` is a declared path."""
        self.metrics.observe(route, log_fields["status"], log_fields, seconds)
        if not access.isEnabledFor(logging.INFO):
            return
        line = {**log_fields, "duration_ms": round(seconds * 1000, 1)}
        access.info(
            "%s %s %d",
            log_fields["method"],
            log_fields["path"],
            log_fields["status"],
            extra={"request": line},
        )

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


class ByteBudget:
    """A limit of bytes for all requests; `budget.of(owner)` is the share of one request."""

    def __init__(self, most: int, keys: int, what: str) -> None:
        self.max_bytes = most
        self.set_key_count(keys)
        self.used_bytes = 0
        self._what = what
        self._of_key: collections.Counter[str] = collections.Counter()

    def set_key_count(self, keys: int) -> None:
        """Set the limit per key: with several keys, no key can use the whole budget."""
        self.most_of_key = self.max_bytes if keys < 2 else -(-self.max_bytes // 2)

    def reserve(self, owner: str) -> "ByteReservation":
        return ByteReservation(self, owner)

    def check(self, owner: str, more: int = 1, own: int = 0) -> None:
        """Raise if `more` bytes exceed the budget; `own` bytes are those that the request already holds.

        A request that is alone may use any amount: otherwise what is larger than the budget could never be
        served.
        """
        mine = self._of_key[owner]
        if mine > own and mine + more > self.most_of_key and self.most_of_key < self.max_bytes:
            raise Overloaded(
                f"{self._what} of this API key use {mine} of {self.most_of_key} bytes; retry when a request "
                "finishes."
            )
        if self.used_bytes > own and self.used_bytes + more > self.max_bytes:
            raise Unavailable(f"{self._what} use {self.used_bytes} of {self.max_bytes} bytes; retry soon.")

    def add(self, owner: str, count: int) -> None:
        self.used_bytes += count
        self._of_key[owner] += count
        if not self._of_key[owner]:
            del self._of_key[owner]


class ReplyBudget(ByteBudget):
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


class ByteReservation:
    """The bytes that one request holds, which may grow and shrink; release them with `release` or as a
    context manager."""

    def __init__(self, budget: ByteBudget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._counted = 0

    def resize(self, size: int, *, checked: bool = True) -> None:
        """Set the number of held bytes; raise and change nothing if they exceed the budget."""
        more = (size if size > FREE_BYTES else 0) - self._counted
        if more > 0 and checked:
            self._budget.check(self._owner, more, self._counted)
        if more:
            self._budget.add(self._owner, more)
            self._counted += more

    def release(self) -> None:
        if self._counted:
            self.resize(0)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.release()


# Admission: which requests are accepted, until when, and a single way to end them.


LONGEST_RETRY_S = 30
CANCEL_GRACE_S = 0.4
"""Seconds that ended requests have to send their error."""


RequestKind: TypeAlias = Literal["asks", "looks", "sends"]
"""`asks` uses the engine, `looks` does not, `sends` uploads a file and lasts as long as the network needs."""


class RequestLimiter:
    """A limit of concurrent requests; above it, only keys with less than an equal share are admitted."""

    def __init__(self, most: int, most_of_key: int, delay: Callable[[], float]) -> None:
        self.max_active = most
        self.most_of_key = most_of_key
        self.delay = delay
        """Returns an estimate of the seconds until a request can be admitted."""
        self.active: set[ActiveRequest] = set()
        self.active_by_key: collections.Counter[str] = collections.Counter()

    def is_full_for(self, owner: str) -> bool:
        keys = len(self.active_by_key) + (owner not in self.active_by_key)
        return len(self.active) >= self.max_active and self.active_by_key.get(owner, 0) >= max(
            1, self.max_active // keys
        )

    def is_key_full(self, owner: str) -> bool:
        return bool(owner) and self.active_by_key.get(owner, 0) >= self.most_of_key

    def limit(self, owner: str) -> int:
        """Return how many requests of this key may be active."""
        return min(self.max_active, self.most_of_key) if owner else self.max_active

    def left(self, owner: str) -> int:
        """Return how many more requests of this key would be admitted now."""
        mine, keys = (
            self.active_by_key.get(owner, 0),
            len(self.active_by_key) + (owner not in self.active_by_key),
        )
        of_all = max(self.max_active - len(self.active), max(1, self.max_active // keys) - mine)
        return max(0, min(of_all, self.most_of_key - mine) if owner else of_all)

    def has_others(self, owner: str) -> bool:
        """Return whether another key has active requests."""
        return any(key != owner for key in self.active_by_key)

    def add(self, visit: "ActiveRequest") -> None:
        self.active.add(visit)
        self.active_by_key[visit.owner] += 1

    def remove(self, visit: "ActiveRequest") -> None:
        self.active.discard(visit)
        self.active_by_key[visit.owner] -= 1
        if not self.active_by_key[visit.owner]:
            self.active_by_key.pop(visit.owner)


class Admission:
    """Admits requests, and keeps the engine queues and the limits of each kind of request."""

    def __init__(self, settings: Settings, metrics: Metrics, workers: WorkerPool, *, keys: int = 1) -> None:
        self._limits = limits = settings.limits
        self._keys = keys
        self._queues: list[EngineQueue] = []
        self._meter: TokenMeter | None = None
        self.timeout = settings.request_timeout
        self.draining = False
        asking = RequestLimiter(limits.queue, limits.queue, self._delay)
        self.limiters: dict[RequestKind, RequestLimiter] = {
            "asks": asking,
            "looks": RequestLimiter(limits.looking, limits.looking, lambda: workers.delay),
            "sends": RequestLimiter(limits.uploads, limits.uploads, lambda: 1.0),
        }
        self.set_key_count(keys)
        workers.has_waiting_others = asking.has_others
        self._emptied: asyncio.Future[None] | None = None
        self._refused = metrics.refused

    def open_queue(self, card: ModelCard) -> EngineQueue:
        """Open the queue of a loaded model; the limit of requests grows by the model's capacity."""
        queue = make_queue(card, self._limits.in_flight, several=self._keys > 1)
        queue.meter = self._meter
        self._queues.append(queue)
        self.set_key_count(self._keys)
        return queue

    def set_meter(self, meter: TokenMeter | None) -> None:
        """Set the meter that counts the tokens of all answers."""
        self._meter = meter
        for queue in self._queues:
            queue.meter = meter

    def close_queue(self, queue: EngineQueue) -> None:
        self._queues.remove(queue)
        self.set_key_count(self._keys)

    @property
    def capacity(self) -> int:
        return sum(queue.capacity for queue in self._queues)

    def _delay(self) -> float:
        return max((queue.pace * (queue.waiting + 1) for queue in self._queues), default=1.0)

    def set_key_count(self, keys: int) -> None:
        """Set the limits per key: half of each with several keys, unless `limits.per_key` sets another."""
        self._keys = keys
        self.limiters["asks"].max_active = self.capacity + self._limits.queue
        for queue in self._queues:
            queue.has_many_keys = keys > 1
        for kind, room in self.limiters.items():
            share = room.max_active if keys < 2 else -(-room.max_active // 2)
            wanted = self._limits.per_key or share
            room.most_of_key = wanted if kind == "asks" else min(wanted, share)

    @property
    def active_count(self) -> int:
        return sum(len(room.active) for room in self.limiters.values())

    def admit(self, owner: str, kind: RequestKind = "asks") -> "ActiveRequest":
        """Admit a request, or raise if a limit is reached."""
        if self.draining:
            self._refused.labels("stopping").inc()
        self.check()
        room = self.limiters[kind]
        if room.is_full_for(owner):
            raise self._refusal(
                room, "queue", f"The server has {room.max_active} requests running or queued; retry soon."
            )
        if room.is_key_full(owner):
            most = room.most_of_key
            message = f"This API key already has {most} requests running or queued; retry when one finishes."
            raise self._refusal(room, "key", message)
        return ActiveRequest(self, room, owner)

    def rate_limit_headers(self, owner: str, kind: RequestKind) -> dict[bytes, bytes]:
        """Return OpenAI's rate-limit headers for a request that is about to be admitted.

        The limits are on concurrent requests: one that ends admits another, at any rate.
        """
        room = self.limiters[kind]
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

    def _refusal(self, room: RequestLimiter, reason: str, message: str) -> Overloaded:
        self._refused.labels(reason).inc()
        kind = ServerFull if reason == "queue" else Overloaded
        return kind(message, retry_after=_wait(room))

    async def cancel_all(self) -> None:
        """Stop admitting requests, and end all active ones, which get a moment to send their error."""
        self.draining = True
        for visit in [visit for room in self.limiters.values() for visit in room.active]:
            visit.cancel(Unavailable("The server stopped before the answer was complete; retry soon."))
        await self.wait_empty(CANCEL_GRACE_S)

    async def wait_empty(self, most: float) -> None:
        """Wait until no request is active, for at most this many seconds."""
        if self.active_count:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._emptied}, timeout=most)

    def left(self) -> None:
        if self._emptied is not None and not self.active_count and not self._emptied.done():
            self._emptied.set_result(None)


def _wait(room: RequestLimiter) -> int:
    """Return the seconds after which a client should retry."""
    return max(1, min(math.ceil(room.delay()), LONGEST_RETRY_S))


class ActiveRequest:
    """An active request, used as a context manager: what ends it early cancels the task and is raised on
    exit.

    Deadline and shutdown work this way: for the task each is one cancellation, whose scopes abort the jobs.
    """

    def __init__(self, admission: Admission, room: RequestLimiter, owner: str) -> None:
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

    def set_timeout(self, seconds: float | None) -> None:
        """Set the deadline, in seconds since the request began; None uses the timeout of the settings."""
        if (seconds := seconds or self._admission.timeout) is not None:
            message = (
                f"The answer was not complete within the timeout of {seconds:g} seconds; raise the timeout"
                " or lower max_tokens."
            )
            when = self._began + seconds
            self._timer = self._loop.call_at(when, lambda: self.cancel(DeadlineExceeded(message)))

    def cancel(self, error: Exception) -> None:
        if self.error is None and self._counts:
            self.error = error
            if self._task is not None:
                self._task.cancel()

    def detach(self) -> "ActiveRequest":
        """Hand over the permit to work that continues in another task."""
        self._leave()
        return ActiveRequest(self._admission, self._room, self.owner)

    def __enter__(self) -> "ActiveRequest":
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
