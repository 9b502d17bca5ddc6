"""A fleet that is not there: a thousand replicas, a million sessions, and several ways to choose a replica.

Each replica has a cache of so many tokens, of which what was used longest ago goes first, and takes longer
the more it must compute. Sessions have the shape of what was published: turns of WildChat (2.5 in the mean,
arXiv 2405.01470), lengths of Azure's conversation trace (medians of 1,020 tokens in and 129 out, Splitwise,
arXiv 2311.18677), and beginnings that many share, a few of them by very many, as in Mooncake's traces (arXiv
2407.00079). The same sessions come to all ways. Hits are told as a part of what one cache without an end
would have; the load is that of the busiest replica over the mean, at moments while all is under way.
"""

import argparse
import random
import statistics
import sys
import time
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from heapq import heappop, heappush
from typing import TypeAlias

from msgspec import Struct, field

from bench import machine
from bench.errors import told
from bench.tables import Table, keep
from dragoman.routing import Router, RoutingKey, digest_hint
from dragoman.routing.key import BLOCK, LEAST_KEPT, _places
from dragoman.routing.router import SLACK, SPREAD, _points

PREFILL_S = 0.0001
"""To compute a token of a prompt."""
DECODE_S = 0.02
THINK_S = 30.0
MASK = (1 << 60) - 1


class Options(Struct, frozen=True):
    replicas: int = 1000
    sessions: int = 1_000_000
    running: float = 8.0
    """Requests that a replica has at the same time, in the mean."""
    cache_tokens: int = 600_000
    """Of a replica."""
    groups: int = 2000
    """Beginnings that are shared."""
    kept: int = 1 << 20


QUICK = Options(replicas=50, sessions=8_000, groups=100, kept=1 << 16)


class Turn(Struct):
    """One request of a session."""

    session: int
    group: int
    shared: int
    """Tokens of the beginning that is its group's."""
    known: int
    """Those before what is new in this turn."""
    prompt: int
    answer: int
    left: int
    """Turns that follow."""


Choose: TypeAlias = Callable[[Turn, list[int], int], int]
"""Turn, what runs at each replica, and what runs in all, to the number of a replica."""


# The sessions.


class Sessions:
    def __init__(self, options: Options) -> None:
        self._chance = random.Random(7)
        self._shared = [_length(self._chance, 700, 0.9) for _ in range(options.groups)]
        # Zipf's law, as for most things that people share.
        self._weights = [1 / (rank + 1) for rank in range(options.groups)]
        self._groups: list[int] = []
        self._count = 0

    def first(self) -> Turn:
        if not self._groups:
            self._groups = self._chance.choices(range(len(self._shared)), self._weights, k=10_000)
        group, self._count = self._groups.pop(), self._count + 1
        shared = self._shared[group]
        turns = min(1 + int(self._chance.expovariate(1 / 1.96)), 40)
        asked, answer = _length(self._chance, 320, 1.0), _length(self._chance, 129, 0.8)
        return Turn(self._count, group, shared, shared, shared + asked, answer, turns - 1)

    def follow(self, turn: Turn) -> Turn:
        known = turn.prompt + turn.answer
        asked, answer = _length(self._chance, 80, 1.0), _length(self._chance, 129, 0.8)
        return Turn(turn.session, turn.group, turn.shared, known, known + asked, answer, turn.left - 1)


def _length(chance: random.Random, median: float, spread: float) -> int:
    return 1 + int(median * chance.lognormvariate(0, spread))


# The replicas.


class Cache:
    """What a replica has computed: beginnings of groups, and sessions behind them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[int, int] = OrderedDict()
        self._tokens = 0

    def take(self, turn: Turn) -> int:
        """How many tokens of the prompt were there; all of it is there afterwards."""
        own, shared = turn.session, -1 - turn.group
        hit = 0
        if shared in self._held:
            hit = turn.shared + min(self._held.get(own, 0), turn.known - turn.shared)
        self._put(own, turn.prompt + turn.answer - turn.shared)
        self._put(shared, turn.shared)
        return hit

    def _put(self, key: int, tokens: int) -> None:
        self._tokens += tokens - self._held.pop(key, 0)
        self._held[key] = tokens
        while self._tokens > self._most:
            self._tokens -= self._held.popitem(last=False)[1]


# Ways to choose.


def choose_random(options: Options) -> Choose:
    chance = random.Random(11)
    return lambda turn, running, total: chance.randrange(options.replicas)


def choose_in_turns(options: Options) -> Choose:
    at = iter(range(1 << 62))
    return lambda turn, running, total: next(at) % options.replicas


def choose_less_of_two(options: Options) -> Choose:
    chance = random.Random(13)

    def choose(turn: Turn, running: list[int], total: int) -> int:
        one, other = chance.randrange(options.replicas), chance.randrange(options.replicas)
        return one if running[one] <= running[other] else other

    return choose


class Ring:
    def __init__(self, replicas: int) -> None:
        names = {number: f"r{number}" for number in range(replicas)}
        points = [(point, number) for number, name in names.items() for point in _points(name)]
        self._points = sorted(points)

    def walk(self, session: int) -> Iterator[int]:
        start = bisect(self._points, (digest_hint(str(session)), 0))
        for step in range(len(self._points)):
            yield self._points[(start + step) % len(self._points)][1]


def choose_by_session(options: Options) -> Choose:
    ring = Ring(options.replicas)
    return lambda turn, running, total: next(ring.walk(turn.session))


def choose_by_session_in_bounds(options: Options) -> Choose:
    ring = Ring(options.replicas)

    def choose(turn: Turn, running: list[int], total: int) -> int:
        bound = max(SLACK, SPREAD * (total + 1) / options.replicas)
        return next(number for number in ring.walk(turn.session) if running[number] < bound)

    return choose


class Routed:
    """The router itself, told of requests and their ends."""

    def __init__(self, options: Options) -> None:
        self.router = Router(options.kept)
        self._names = [f"r{number}" for number in range(options.replicas)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        for name in self._names:
            self.router.add(name)

    def choose(self, turn: Turn, key: RoutingKey) -> int:
        name = self.router.rank(key)[0]
        self.router.begin(key, name)
        return self._numbers[name]

    def end(self, number: int) -> None:
        self.router.end(self._names[number])

    @property
    def bytes(self) -> int:
        halves = self.router._young, self.router._old
        return sum(sys.getsizeof(half) + 32 * len(half) for half in halves)


@cache
def _placed(blocks: int) -> list[int]:
    return [place * BLOCK for place in _places(blocks)]


def key_of(turn: Turn) -> RoutingKey:
    """As `key_of_ids` would make it of the ids, which nobody has here."""
    chain = tuple(
        (place, hash((turn.group, place, 1) if place <= turn.shared else (turn.session, place, 2)) & MASK)
        for place in _placed(turn.prompt // BLOCK)
    )
    doubled = [digest for place, digest in chain if place >= LEAST_KEPT and not place & (place - 1)]
    marks = dict.fromkeys([*doubled, *(digest for _, digest in chain[-1:])])
    return RoutingKey(
        chain=chain, marks=tuple(marks), tokens=turn.prompt, home=digest_hint(f"{turn.session} {turn.prompt}")
    )


# A run.


class Result(Struct):
    way: str
    asked: int = 0
    prompt: int = 0
    hit: int = 0
    best: int = 0
    """Tokens that a cache without an end would have had."""
    spent_s: float = 0.0
    busiest: list[float] = field(default_factory=list)
    kept_bytes: int = 0


WAYS: dict[str, Callable[[Options], Choose]] = {
    "random": choose_random,
    "round robin": choose_in_turns,
    "less busy of two": choose_less_of_two,
    "consistent hashing of the session": choose_by_session,
    "the same, bounded load": choose_by_session_in_bounds,
}
OURS = "dragoman.routing"


class Fleet:
    """Time goes from event to event: requests come, and end."""

    def __init__(self, way: str, options: Options) -> None:
        self.result = Result(way)
        self._options = options
        self._routed = Routed(options) if way == OURS else None
        self._choose = None if self._routed else WAYS[way](options)
        self._caches = [Cache(options.cache_tokens) for _ in range(options.replicas)]
        self._running = [0] * options.replicas
        self._total = 0
        self._events: list[tuple[float, int, Turn | int]] = []
        self._seen = bytearray(options.groups)
        self._sessions = Sessions(options)

    def run(self) -> Result:
        chance, number = random.Random(17), 0
        # So many come as keep the replicas at the wanted load: answers take about 3.5 seconds.
        rate = self._options.replicas * self._options.running / 3.6 / 2.5
        arrives, left = 0.0, self._options.sessions
        what: Turn | int
        while left or self._events:
            if left and (not self._events or arrives <= self._events[0][0]):
                now, what = arrives, self._sessions.first()
                arrives, left = arrives + chance.expovariate(rate), left - 1
            else:
                now, _, what = heappop(self._events)
            if isinstance(what, int):
                self._end(what)
                continue
            number += 2
            chosen, takes = self._begin(what)
            heappush(self._events, (now + takes, number, chosen))
            if what.left:
                after = now + takes + chance.expovariate(1 / THINK_S)
                heappush(self._events, (after, number + 1, self._sessions.follow(what)))
            if left and number % 8192 == 0:
                self.result.busiest.append(max(self._running) / (self._total / len(self._running)))
        if self._routed is not None:
            self.result.kept_bytes = self._routed.bytes
        return self.result

    def _begin(self, turn: Turn) -> tuple[int, float]:
        """Who gets it, and how long it takes."""
        result, routed = self.result, self._routed
        key = key_of(turn) if routed is not None else None
        began = time.perf_counter()
        if routed is not None and key is not None:
            chosen = routed.choose(turn, key)
        else:
            assert self._choose is not None
            chosen = self._choose(turn, self._running, self._total)
        result.spent_s += time.perf_counter() - began
        hit = self._caches[chosen].take(turn)
        result.asked += 1
        result.prompt += turn.prompt
        result.hit += hit
        result.best += turn.known if self._seen[turn.group] else 0
        self._seen[turn.group] = 1
        self._running[chosen] += 1
        self._total += 1
        # A replica that has more to do is slower at all of it.
        slower = 1 + self._running[chosen] / 64
        takes = ((turn.prompt - hit) * PREFILL_S + turn.answer * DECODE_S) * slower
        return chosen, takes

    def _end(self, chosen: int) -> None:
        self._running[chosen] -= 1
        self._total -= 1
        if self._routed is not None:
            self._routed.end(chosen)


def table(results: list[Result], options: Options) -> Table:
    rows = [
        (
            result.way,
            f"{result.hit / result.prompt:.1%}",
            f"{result.hit / result.best:.1%}",
            f"{statistics.median(result.busiest):.2f}",
            f"{result.spent_s / result.asked * 1e6:.1f}",
            f"{result.kept_bytes / 1e6:.0f} MB" if result.kept_bytes else "-",
        )
        for result in results
    ]
    asked = results[0].asked
    return Table(
        f"{options.replicas:,} replicas, {options.sessions:,} sessions, {asked:,} requests",
        ("way", "tokens from caches", "of the most", "busiest/mean", "µs a choice", "memory"),
        rows,
        [f"{machine.describe()}."],
    )


def run(options: Options) -> list[Result]:
    results = []
    for way in (*WAYS, OURS):
        began = time.monotonic()
        results.append(Fleet(way, options).run())
        print(f"fleet: {way}: {time.monotonic() - began:.0f} seconds", flush=True)
    return results


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="50 replicas and 8,000 sessions")
    options = QUICK if parser.parse_args().quick else Options()
    results = run(options)
    keep("fleet", results, [table(results, options)])


if __name__ == "__main__":
    sys.exit(told(cli))
