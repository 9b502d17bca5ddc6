"""A fleet that is not there: a thousand replicas, a million sessions, and several ways to choose a replica.

Each replica has a cache of so many tokens, of which what was used longest ago goes first, and takes longer
the more it must compute. The same sessions come to all ways. Hits are told as a part of what one cache
without an end would have; the load is that of the busiest replica over the mean, at moments while all is
under way. Sessions have the shape of what was published, not its very requests:

- `chat`: 2.5 turns in the mean as in WildChat (arXiv 2405.01470), lengths of Azure's conversation trace
  (medians of 1,020 tokens in and 129 out, Splitwise, arXiv 2311.18677), and beginnings that many share, a few
  of them by very many, as in Mooncake's traces (arXiv 2407.00079).
- `agents`: a median of 33 turns, about 80,000 tokens at the 30th, and 131 tokens in for one out, as vLLM's
  project tells of Codex on SWE-bench Pro (610 traces, "Serving Agentic Workloads at Scale", 2026); tools and
  instructions of about 15,000 tokens that all of an agent share, as in SemiAnalysis' traces of Claude
  Code (cc-traces-weka-042026). A turn follows when the tools are done, seconds later.

`--weigh 64,256` asks what comes of other values of the router's one constant that is a matter of taste, what
a running request weighs in a choice; `--seed` makes other sessions of the same shape.
"""

import argparse
import os
import random
import statistics
import sys
import time
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from heapq import heappop, heappush
from typing import TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from bench import machine
from bench.errors import told
from bench.tables import Table, keep
from dragoman.routing import Router, RoutingKey, digest_hint, key_of_ids, router
from dragoman.routing.key import BLOCK, LEAST_KEPT, _places
from dragoman.routing.router import LOAD_TOKENS, SLACK, SPREAD, _points

PREFILL_S = 0.0001
"""To compute a token of a prompt."""
DECODE_S = 0.02
MASK = (1 << 60) - 1
TIMED = 16
"""One of so many choices is timed: a look at the clock costs about as much as the cheap ones."""


class Shape(Struct, frozen=True):
    """Lengths are in tokens, each a median and how far it spreads (of a lognormal)."""

    shared: tuple[float, float]
    first: tuple[float, float]
    """What is new in the first turn."""
    later: tuple[float, float]
    answer: tuple[float, float]
    turns: Callable[[random.Random], int]
    mean_turns: float
    answer_s: float
    """How long an answer takes, in the mean: with it, how many sessions come in a second."""
    think_s: float


CHAT = Shape(
    shared=(700, 0.9),
    first=(320, 1.0),
    later=(80, 1.0),
    answer=(129, 0.8),
    turns=lambda chance: min(1 + int(chance.expovariate(1 / 1.96)), 40),
    mean_turns=2.5,
    answer_s=3.6,
    think_s=30.0,
)
AGENTS = Shape(
    shared=(15_000, 0.2),
    first=(3000, 1.0),
    later=(1000, 0.9),
    answer=(350, 0.8),
    turns=lambda chance: min(1 + int(33 * chance.lognormvariate(0, 0.35)), 120),
    mean_turns=35.5,
    answer_s=11.5,
    think_s=5.0,
)
SHAPES = {"chat": CHAT, "agents": AGENTS}


class Options(Struct, frozen=True):
    shape: str = "chat"
    replicas: int = 1000
    sessions: int = 1_000_000
    running: float = 8.0
    """Requests that a replica has at the same time, in the mean."""
    cache_tokens: int = 600_000
    """Of a replica."""
    groups: int = 2000
    """Beginnings that are shared."""
    kept: int = 1 << 20
    seed: int = 0
    weighs: tuple[int, ...] = ()
    """Values of LOAD_TOKENS to try beside the router's own."""


FULL = {
    "chat": Options(),
    # As many requests, about; what a session needs is larger, and so must be the caches.
    "agents": Options(shape="agents", sessions=60_000, cache_tokens=2_000_000, groups=100),
}
QUICK = {
    "chat": Options(replicas=50, sessions=8_000, groups=100, kept=1 << 16),
    "agents": Options(
        shape="agents", replicas=50, sessions=2000, cache_tokens=2_000_000, groups=20, kept=1 << 16
    ),
}


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
    rest: list[tuple[int, int, float]]
    """Turns that follow, the last first: tokens that are new, of the answer, and seconds before it."""
    chain: tuple[tuple[int, int], ...] = ()
    """The digests that are made already."""


Choose: TypeAlias = Callable[[Turn, list[int], int], int]
"""Turn, what runs at each replica, and what runs in all, to the number of a replica."""


# The sessions.


class Sessions:
    def __init__(self, options: Options) -> None:
        self._shape = SHAPES[options.shape]
        self._chance = random.Random(7 + options.seed)
        self._shared = [_length(self._chance, self._shape.shared) for _ in range(options.groups)]
        # Zipf's law, as for most things that people share.
        self._weights = [1 / (rank + 1) for rank in range(options.groups)]
        self._groups: list[int] = []
        self._count = 0

    def first(self) -> Turn:
        if not self._groups:
            self._groups = self._chance.choices(range(len(self._shared)), self._weights, k=10_000)
        group, self._count = self._groups.pop(), self._count + 1
        shared = self._shared[group]
        shape, chance = self._shape, self._chance
        asked, answer = _length(chance, shape.first), _length(chance, shape.answer)
        # All of it now: what a session is must not depend on who was answered when.
        pauses = (chance.expovariate(1 / shape.think_s) for _ in range(shape.turns(chance) - 1))
        rest = [(_length(chance, shape.later), _length(chance, shape.answer), pause) for pause in pauses]
        return Turn(self._count, group, shared, shared, shared + asked, answer, rest)

    def follow(self, turn: Turn) -> tuple[float, Turn]:
        """The next turn, and how long after the answer it comes."""
        asked, answer, pause = turn.rest.pop()
        known = turn.prompt + turn.answer
        return pause, replace(turn, known=known, prompt=known + asked, answer=answer)


def _length(chance: random.Random, length: tuple[float, float]) -> int:
    median, spread = length
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


class RoutedFleet:
    """The router itself, told of requests and their ends."""

    def __init__(self, options: Options) -> None:
        self.router = Router(options.kept)
        self._names = [f"r{number}" for number in range(options.replicas)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        for name in self._names:
            self.router.add(name)

    def choose(self, key: RoutingKey) -> int:
        name = self.router.rank(key)[0]
        self.router.begin(key, name)
        return self._numbers[name]

    def end(self, number: int) -> None:
        self.router.end(self._names[number])

    @property
    def bytes(self) -> int:
        halves = self.router._young, self.router._old
        homes = {id(each): each for half in halves for each in half.values()}
        kept = sum(sys.getsizeof(half) + 32 * len(half) for half in halves)
        return kept + sum(map(sys.getsizeof, homes.values()))


@cache
def _placed(blocks: int) -> list[int]:
    return [index * BLOCK for index in _places(blocks)]


def key_of(turn: Turn) -> RoutingKey:
    """As `key_of_ids` would make it of the ids, which nobody has here."""
    chain = turn.chain = (
        *turn.chain,
        *(
            (index, hash((turn.group, index, 1) if index <= turn.shared else (turn.session, index, 2)) & MASK)
            for index in _placed(turn.prompt // BLOCK)[len(turn.chain) :]
        ),
    )
    doubled = [
        digest for position, digest in chain if position >= LEAST_KEPT and not position & (position - 1)
    ]
    marks = dict.fromkeys([*doubled, *(digest for _, digest in chain[-1:])])
    return RoutingKey(
        prefix_digests=chain,
        remembered_digests=tuple(marks),
        tokens=turn.prompt,
        ring_position=digest_hint(f"{turn.session} {turn.prompt}"),
    )


def time_keys(tokens: int) -> float:
    """Seconds to make the key of a prompt of so many ids, the quickest of some."""
    times, ids = [], list(range(tokens))
    for _ in range(50):
        began = time.thread_time()
        key_of_ids(ids)
        times.append(time.thread_time() - began)
    return min(times)


# A run.


class Result(Struct):
    way: str
    asked: int = 0
    prompt: int = 0
    hit: int = 0
    best: int = 0
    """Tokens that a cache without an end would have had."""
    timed: int = 0
    spent_s: float = 0.0
    """For the choices that were timed."""
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


def _name_weighed(weigh: int) -> str:
    return f"{OURS}, {weigh} tokens a request"


class Fleet:
    """Time goes from event to event: requests come, and end."""

    def __init__(self, way: str, options: Options) -> None:
        self.result = Result(way)
        self._options = options
        self._routed = RoutedFleet(options) if way.startswith(OURS) else None
        self._choose = None if self._routed else WAYS[way](options)
        self._caches = [Cache(options.cache_tokens) for _ in range(options.replicas)]
        self._running = [0] * options.replicas
        self._total = 0
        self._events: list[tuple[float, int, Turn | int]] = []
        self._seen = bytearray(options.groups)
        self._sessions = Sessions(options)

    def run(self) -> Result:
        options, shape = self._options, SHAPES[self._options.shape]
        chance, number = random.Random(17 + options.seed), 0
        # So many come as keep the replicas at the wanted load.
        rate = options.replicas * options.running / shape.answer_s / shape.mean_turns
        arrives, left = 0.0, options.sessions
        what: Turn | int
        while left or self._events:
            if left and (not self._events or arrives <= self._events[0][0]):
                now, what = arrives, self._sessions.first()
                arrives, left = arrives + chance.expovariate(rate), left - 1
                if left % (options.sessions // 10) == 0:
                    told_of = 100 - 100 * left // options.sessions
                    print(f"fleet: {self.result.way}: {told_of} %", flush=True)
            else:
                now, _, what = heappop(self._events)
            if isinstance(what, int):
                self._end(what)
                continue
            number += 2
            chosen, takes = self._begin(what)
            heappush(self._events, (now + takes, number, chosen))
            if what.rest:
                pause, follows = self._sessions.follow(what)
                heappush(self._events, (now + takes + pause, number + 1, follows))
            if left and number % 8192 == 0:
                self.result.busiest.append(max(self._running) / (self._total / len(self._running)))
        if self._routed is not None:
            self.result.kept_bytes = self._routed.bytes
        return self.result

    def _begin(self, turn: Turn) -> tuple[int, float]:
        """Who gets it, and how long it takes."""
        result = self.result
        chosen = self._chosen(turn)
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

    def _chosen(self, turn: Turn) -> int:
        routed, choose = self._routed, self._choose
        key = key_of(turn) if routed is not None else RoutingKey()
        timed = self.result.asked % TIMED == 0
        # Of this thread alone: the machine may do other things meanwhile.
        began = time.thread_time() if timed else 0.0
        if routed is not None:
            chosen = routed.choose(key)
        else:
            assert choose is not None
            chosen = choose(turn, self._running, self._total)
        if timed:
            self.result.timed += 1
            self.result.spent_s += time.thread_time() - began
        return chosen

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
            f"{result.spent_s / result.timed * 1e6:.1f}",
            f"{result.kept_bytes / 1e6:.0f} MB" if result.kept_bytes else "-",
        )
        for result in results
    ]
    asked = results[0].asked
    shape = f"{options.shape}, {options.replicas:,} replicas, {options.sessions:,} sessions"
    keys = ", ".join(f"{time_keys(tokens) * 1e6:.0f} µs of {tokens:,}" for tokens in (1000, 10_000, 50_000))
    return Table(
        f"{shape}, {asked:,} requests of {results[0].prompt / asked:,.0f} tokens",
        ("way", "tokens from caches", "of the most", "busiest/mean", "µs a choice", "memory"),
        rows,
        [f"To make the key of a prompt of ids: {keys}.", f"{machine.describe()}."],
    )


def _run_way(way: str, options: Options, weigh: int) -> Result:
    router.LOAD_TOKENS = weigh
    return Fleet(way, options).run()


def run(options: Options, processes: int) -> list[Result]:
    """Each way in a process of its own."""
    ways = [(way, LOAD_TOKENS) for way in (*WAYS, OURS)]
    ways += [(_name_weighed(weigh), weigh) for weigh in options.weighs]
    with ProcessPoolExecutor(processes, max_tasks_per_child=1) as pool:
        # The longest first.
        fields = {way: pool.submit(_run_way, way, options, weigh) for way, weigh in reversed(ways)}
        return [fields[way].result() for way, _ in ways]


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="50 replicas and few sessions")
    parser.add_argument("--shape", choices=SHAPES, default="chat", help="what sessions are like")
    parser.add_argument("--seed", type=int, default=0, help="other sessions of the same shape")
    parser.add_argument("--weigh", default="", help="values of the router's LOAD_TOKENS to try, too")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    weighs = tuple(int(each) for each in args.weigh.split(",") if each)
    options = replace((QUICK if args.quick else FULL)[args.shape], seed=args.seed, weighs=weighs)
    results = run(options, args.processes)
    keep(f"fleet-{options.shape}", results, [table(results, options)])


if __name__ == "__main__":
    sys.exit(told(cli))
