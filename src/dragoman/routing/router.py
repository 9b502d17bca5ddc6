"""A router: where beginnings were computed lately, how much each replica has to do, and who is next.

Three things decide. What a replica would have to compute: the tokens of the request less those of the longest
beginning that is known to be there. What it has to do already: each running request counts as so many
tokens. And a bound that nothing overrules: nobody gets more than a quarter above the average, so that a
beginning that everybody has spreads over as many replicas as it takes.

Who is looked at: those that are known to have a beginning of the request, and two that its digest leads to
on a ring (all, where they are few). So a choice costs the same for four replicas and for a thousand, and a
replica that comes or goes changes the way of its own share alone.

Nothing here waits, and there is no clock and no chance: the same state gives the same answer.
"""

from bisect import bisect, insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from math import ceil

from msgspec import Struct

from dragoman.routing.key import DIGEST_BITS, RoutingKey, digest_hint

LOAD_TOKENS = 128
"""What one more running request at a replica is worth in tokens to compute."""
HINT_TOKENS = 4096
"""What a client's word for it is worth that its conversation is at a replica."""
SPREAD = 1.25
"""How much more than the average a replica may have."""
SLACK = 4
"""So many requests a replica may have whatever the average is."""
FEW = 8
"""So many replicas are all looked at."""
HOMES = 4
"""Replicas that are remembered for one beginning."""
POINTS = 32
"""Of each replica on the ring."""
MOST_KEPT = 256 * 1024
"""Beginnings that are remembered, of about 100 bytes each."""
MOST_NEWS = 4096


class RoutedReplica(Struct):
    name: str
    number: int
    """A new one for each life: what was remembered of an earlier one is of nobody."""
    running: int = 0
    draining: bool = False
    sole: tuple[int, ...] = ()
    """Most beginnings are at one replica; they share this."""


class Router:
    def __init__(self, most: int = MOST_KEPT) -> None:
        self._replicas: dict[str, RoutedReplica] = {}
        self._by_number: dict[int, RoutedReplica] = {}
        self._ring: list[tuple[int, str]] = []
        self._total = 0
        """What all of them have to do."""
        self._open = 0
        """How many are not draining."""
        self._numbers = 0
        # What is used lives in the young half. When that is full the old half is forgotten, and the young one
        # is the old: about the order of use, without a list to keep it.
        self._most = max(most // 2, 1)
        self._young: dict[int, tuple[int, ...]] = {}
        self._old: dict[int, tuple[int, ...]] = {}
        self._news: deque[tuple[int, str]] = deque(maxlen=MOST_NEWS)
        self._told = 0

    # Who is there.

    @property
    def names(self) -> list[str]:
        return [*self._replicas]

    @property
    def kept(self) -> int:
        """Beginnings that are remembered."""
        return len(self._young) + len(self._old)

    def running(self, name: str) -> int:
        return self._replicas[name].running

    def add(self, name: str) -> None:
        if name not in self._replicas:
            self._live(RoutedReplica(name, 0))
            self._open += 1
            for point in _points(name):
                insort(self._ring, (point, name))

    def remove(self, name: str) -> None:
        replica = self._replicas.pop(name, None)
        if replica is not None:
            del self._by_number[replica.number]
            self._total -= replica.running
            self._open -= not replica.draining
            self._ring = [entry for entry in self._ring if entry[1] != name]

    def restart(self, name: str) -> None:
        """It has forgotten what it had computed. What it is asked for by others is still running."""
        replica = self._replicas[name]
        del self._by_number[replica.number]
        self._live(replica)

    def drain(self, name: str, draining: bool = True) -> None:
        """It gets nothing new, if anybody else is there."""
        replica = self._replicas[name]
        self._open += replica.draining - draining
        replica.draining = draining

    def _live(self, replica: RoutedReplica) -> None:
        self._numbers += 1
        replica.number, replica.sole = self._numbers, (self._numbers,)
        self._replicas[replica.name] = self._by_number[replica.number] = replica

    # Who is next.

    def rank(self, key: RoutingKey, avoid: Collection[str] = ()) -> list[str]:
        """Names, the best first, at least one if there is any; those to avoid where there are no others.

        The first has room within the bound, unless only those to avoid have.
        """
        known, bound = self._known(key), self.bound()
        fine, full, strangers = list[tuple[int, int, str]](), list[tuple[int, int, str]](), 0
        looked = FEW if len(self._replicas) <= FEW else 2
        for order, replica in enumerate(self._candidates(key, known)):
            if replica.name in avoid:
                continue
            cost = key.tokens - known.get(replica.number, 0) + LOAD_TOKENS * replica.running
            (fine if replica.running < bound else full).append((cost, order, replica.name))
            strangers += replica.number not in known
            if fine and strangers >= looked:
                break
        found = [name for _, _, name in sorted(fine)] + [name for _, _, name in sorted(full)]
        return found if found or not avoid else self.rank(key)

    def bound(self) -> int:
        """Requests that a replica may have, the next one included."""
        return max(SLACK, ceil(SPREAD * (self._total + 1) / max(self._open or len(self._replicas), 1)))

    def _candidates(self, key: RoutingKey, known: Mapping[int, int]) -> Iterator[RoutedReplica]:
        """Those who know something of it, then the others as they lie on the ring."""
        for number in known:
            replica = self._by_number[number]
            if not (replica.draining and self._open):
                yield replica
        for replica in self._walk(key.home):
            if replica.number not in known and not (replica.draining and self._open):
                yield replica

    def _known(self, key: RoutingKey) -> dict[int, int]:
        """Replicas that have a beginning, and how many tokens of it."""
        known: dict[int, int] = {}
        for tokens, digest in reversed(key.chain):
            for number in self._find(digest):
                if number not in known and number in self._by_number:
                    known[number] = tokens
            if len(known) >= HOMES:
                break
        for hint in key.hints:
            homes = [number for number in self._find(hint) if number in self._by_number]
            if homes:
                # The newest: where it was last is where it has most.
                known[homes[0]] = known.get(homes[0], 0) + HINT_TOKENS
                break
        return known

    def _find(self, digest: int) -> tuple[int, ...]:
        return self._young.get(digest) or self._old.get(digest) or ()

    def _walk(self, home: int) -> Iterator[RoutedReplica]:
        """All, in the order in which they lie on the ring from this place on."""
        start, count = bisect(self._ring, (home, "")), len(self._ring)
        seen = set[str]()
        for step in range(count):
            name = self._ring[(start + step) % count][1]
            if name not in seen:
                seen.add(name)
                yield self._replicas[name]

    # What is running, and what is remembered.

    def begin(self, key: RoutingKey, name: str) -> None:
        """The replica gets the request: it will have computed all of it."""
        replica = self._replicas[name]
        replica.running += 1
        self._total += 1
        for digest in (*key.marks, *key.hints):
            self._tell(digest, replica)

    def end(self, name: str) -> None:
        replica = self._replicas.get(name)
        if replica is not None and replica.running:
            replica.running -= 1
            self._total -= 1

    def set_load(self, name: str, running: int) -> None:
        """What the replica itself says that it has to do, where others ask it, too."""
        replica = self._replicas[name]
        self._total += running - replica.running
        replica.running = running

    def remember(self, hint: str, name: str, owner: str = "") -> None:
        """What a client may name next time: the id of a response that this replica has made."""
        self._tell(digest_hint(hint, owner), self._replicas[name])

    def _tell(self, digest: int, replica: RoutedReplica) -> None:
        if self._keep(digest, replica):
            self._news.append((digest, replica.name))
            self._told += 1

    def _keep(self, digest: int, replica: RoutedReplica) -> bool:
        """Whether that was news."""
        homes = self._find(digest)
        if not homes:
            homes = replica.sole
        elif homes[0] != replica.number:
            others = [n for n in homes if n != replica.number and n in self._by_number]
            homes = (replica.number, *others[: HOMES - 1]) if others else replica.sole
        elif digest in self._young:
            return False
        if digest not in self._young and len(self._young) >= self._most:
            self._old, self._young = self._young, {}
        self._old.pop(digest, None)
        self._young[digest] = homes
        return True

    # What several routers tell each other.

    def news(self, since: int = 0) -> tuple[int, list[tuple[int, str]]]:
        """What was remembered since then, as far as that is still known, and from where to ask next time."""
        fresh = min(self._told - since, len(self._news))
        return self._told, [*self._news][len(self._news) - fresh :] if fresh > 0 else []

    def hear(self, news: Iterable[tuple[int, str]]) -> None:
        """What another router remembers. It is not told on: everybody keys everybody."""
        for digest, name in news:
            if (replica := self._replicas.get(name)) is not None:
                self._keep(digest, replica)


def _points(name: str) -> Iterator[int]:
    for number in range(POINTS):
        digest = blake2b(f"{name} {number}".encode(), digest_size=8).digest()
        yield int.from_bytes(digest, "little") >> (64 - DIGEST_BITS)
