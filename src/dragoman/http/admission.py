"""The door: who is let in and until when, how much all of them may hold, and what is noted of them.

A request is let in before its body is read, so that a refusal costs next to nothing. Inside, its work waits
in the queue until the engine has room for it. Requests that only look (tokens, prompts, what is stored)
take none of the engine's time: they are counted apart, so that no flood of them keeps answers out.
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

# What is noted: a line in the access log, and figures, which `http/metrics.py` writes for Prometheus.
#
# Figures of answers are plain numbers: they are added to on the event loop alone, and read there. So nothing
# is paid for a token, and little for a request.


SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
COUNTS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
TOKENS = ("prompt_tokens", "cached_tokens", "restored_tokens", "completion_tokens")
FINISHES = ("stop", "length", "error", "disconnect")


class Spread:
    """Numbers counted by the bounds they lie between, and their sum: a histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, number: float) -> None:
        self.counts[bisect_left(self.bounds, number)] += 1
        self.total += number


class ModelFigures:
    """What is counted of the answers that one model has given, by the name that it was asked by."""

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
    """A model that is served, and what can be seen of it at any moment."""

    queue: EngineQueue
    engine: Engine
    adapters: AdapterShelf


class Metrics:
    """One registry per app, so that two apps in a process do not share their figures."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.in_flight, being = 0, "Requests being served"
        Gauge("dragoman_requests_in_flight", being, registry=registry).set_function(lambda: self.in_flight)
        self.refused = Counter(
            "dragoman_refused", "Requests refused at the door, by reason", ["reason"], registry=registry
        )
        requests = Counter(
            "dragoman_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        # The labels are few, and looking for their figures each time takes longer than adding to them.
        self._requests = cache(requests.labels)
        self.whole = Spread(SECONDS)
        self.models: defaultdict[str, ModelFigures] = defaultdict(ModelFigures)
        """By the names that models are asked by; whoever names one that is not there is answered by another
        name, or not at all."""
        self.live: dict[str, LiveModel] = {}
        """By the names of the models that are served."""
        self.listeners: list[Callable[[str, dict[str, Any], float], None]] = []
        """Who else wants to know, of each request: its route, the facts, and how long it took."""

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
        """`facts` have a method, a path and a status; `route` is one of a fixed set of names."""
        self.metrics.observe(route, facts["status"], facts, seconds)
        if not access.isEnabledFor(logging.INFO):
            return
        line = {**facts, "duration_ms": round(seconds * 1000, 1)}
        access.info("%s %s %d", facts["method"], facts["path"], facts["status"], extra={"request": line})

    @contextmanager
    def work(self, method: str, path: str) -> Iterator[dict[str, Any]]:
        """For what is no HTTP request of its own. The block adds the facts."""
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


# Bytes that are held for clients, all of them together, and how much of it may be one key's.
#
# A body that is not all there yet, a page that its client does not read: each is harmless, and a thousand
# of them are the memory of the machine. So what is held beyond a little is counted, and refused where there
# is no room, at once: who waits for room while holding some would wait for others that do the same.


FREE_BYTES = 64 * 1024
"""What everybody may hold: small requests are served however many large ones there are."""
LOADED_AT_ONCE = 2
"""Of one key; what the store gives is counted before the next is asked for."""


class Budget:
    """`budget.of(owner)` is what one request holds of it."""

    def __init__(self, most: int, keys: int, what: str) -> None:
        self.most = most
        self.share_between(keys)
        self.held = 0
        self._what = what
        self._of_key: collections.Counter[str] = collections.Counter()

    def share_between(self, keys: int) -> None:
        """Of several keys, none can keep all others out."""
        self.most_of_key = self.most if keys < 2 else -(-self.most // 2)

    def of(self, owner: str) -> "Holding":
        return Holding(self, owner)

    def check(self, owner: str, more: int = 1, own: int = 0) -> None:
        """Raises where there is no room for so many more, beside those that the same request holds.

        Who is alone has room for anything: otherwise what is larger than all of it could never be had.
        """
        mine = self._of_key[owner]
        if mine > own and mine + more > self.most_of_key and self.most_of_key < self.most:
            raise Overloaded(
                f"{self._what} of this key take {mine} bytes, and may take {self.most_of_key}; "
                "let one of them end."
            )
        if self.held > own and self.held + more > self.most:
            raise Unavailable(
                f"{self._what} take {self.held} bytes, and may take {self.most}; try again soon."
            )

    def add(self, owner: str, count: int) -> None:
        self.held += count
        self._of_key[owner] += count
        if not self._of_key[owner]:
            del self._of_key[owner]


class Replies(Budget):
    """That of what is sent. How large something stored is, is known when it is there: so few come at once."""

    def __init__(self, most: int, keys: int) -> None:
        super().__init__(most, keys, "Replies that are not read yet")
        self._loading: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(LOADED_AT_ONCE)
        )

    def loading(self, owner: str) -> asyncio.Semaphore:
        """`async with` it, what is stored is loaded: a key's next one waits until this one is counted."""
        return self._loading[owner]


class Holding:
    """What one request holds, which may grow and shrink. It must be ended, or `with` it something done."""

    def __init__(self, budget: Budget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._counted = 0

    def be(self, size: int, *, checked: bool = True) -> None:
        """From now on so many bytes are held. Raises where there is no room for them, and changes nothing."""
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


# Who is let in, until when, and one way to end those who are inside.


LONGEST_RETRY_S = 30
PATIENCE_S = 0.4
"""What those who are ended get to tell it to their clients."""


VisitKind: TypeAlias = Literal["asks", "looks", "sends"]
"""For an answer; for what takes none of the engine's time; or with a file, as long as a network takes."""


class Room:
    """So many requests fit in, and beyond them those of keys that have less than an equal share inside."""

    def __init__(self, most: int, most_of_key: int, delay: Callable[[], float]) -> None:
        self.most = most
        self.most_of_key = most_of_key
        self.delay = delay
        """Seconds until there may be room again, about."""
        self.inside: set[Visit] = set()
        self.of_key: collections.Counter[str] = collections.Counter()

    def full_for(self, owner: str) -> bool:
        keys = len(self.of_key) + (owner not in self.of_key)
        return len(self.inside) >= self.most and self.of_key.get(owner, 0) >= max(1, self.most // keys)

    def full_of(self, owner: str) -> bool:
        return bool(owner) and self.of_key.get(owner, 0) >= self.most_of_key

    def limit(self, owner: str) -> int:
        """How many requests of this key may be inside."""
        return min(self.most, self.most_of_key) if owner else self.most

    def left(self, owner: str) -> int:
        """How many more of this key would be let in now."""
        mine, keys = self.of_key.get(owner, 0), len(self.of_key) + (owner not in self.of_key)
        of_all = max(self.most - len(self.inside), max(1, self.most // keys) - mine)
        return max(0, min(of_all, self.most_of_key - mine) if owner else of_all)

    def has_others(self, owner: str) -> bool:
        """Than this key."""
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
    """The queues of what is computed, the requests that stand in one or are about to, and those that look."""

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
        """Of a model that is loaded now: there is room for more requests by what it computes."""
        queue = make_queue(card, self._limits.in_flight, several=self._keys > 1)
        queue.meter = self._meter
        self._queues.append(queue)
        self.share_between(self._keys)
        return queue

    def set_meter(self, meter: Meter | None) -> None:
        """What counts the tokens of all answers."""
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
        """Of several keys each has half of a room; `limits.per_key` may say less, and of answers more."""
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
        """Refuses at once what there is no room for."""
        if self.draining:
            self._refused.labels("stopping").inc()
        self.check()
        room = self.rooms[kind]
        if room.full_for(owner):
            raise self._refusal(
                room, "queue", f"{room.most} requests are being served or wait; try again soon."
            )
        if room.full_of(owner):
            most = room.most_of_key
            message = f"{most} requests of this key are being served or wait; let one of them end."
            raise self._refusal(room, "key", message)
        return Visit(self, room, owner)

    def rates(self, owner: str, kind: VisitKind) -> dict[bytes, bytes]:
        """What OpenAI's headers say of limits, of a request that asks to be let in.

        Ours are of requests at a time: one that ends makes room for another, at whatever rate.
        """
        room = self.rooms[kind]
        left = room.left(owner)
        return {
            b"x-ratelimit-limit-requests": b"%d" % room.limit(owner),
            b"x-ratelimit-remaining-requests": b"%d" % max(left - 1, 0),
            b"x-ratelimit-reset-requests": b"%ds" % (0 if left > 1 else _wait(room)),
        }

    def check(self) -> None:
        """Raises when nothing is let in any more."""
        if self.draining:
            raise Unavailable("The server is stopping; try again.", code="stopping")

    def _refusal(self, room: Room, reason: str, message: str) -> Overloaded:
        self._refused.labels(reason).inc()
        kind = ServerFull if reason == "queue" else Overloaded
        return kind(message, retry_after=_wait(room))

    async def end_all(self) -> None:
        """Nothing is let in any more, and everybody inside has a moment to tell why it ended."""
        self.draining = True
        for visit in [visit for room in self.rooms.values() for visit in room.inside]:
            visit.end(Unavailable("The server was stopped before the answer was done; try again."))
        await self.emptied(PATIENCE_S)

    async def emptied(self, most: float) -> None:
        """Returns when nobody is inside, or after so many seconds."""
        if self.inside:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._emptied}, timeout=most)

    def left(self) -> None:
        if self._emptied is not None and not self.inside and not self._emptied.done():
            self._emptied.set_result(None)


def _wait(room: Room) -> int:
    """Seconds after which to try again."""
    return max(1, min(math.ceil(room.delay()), LONGEST_RETRY_S))


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
        if (seconds := seconds or self._admission.timeout) is not None:
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
