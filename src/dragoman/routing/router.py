"""Router: recently computed prefixes, the load of each replica, and the choice for the next request.

Three things decide. The work for a replica: the tokens of the request minus those of its longest prefix known
to be there. The load: each running request counts as a number of tokens. And a strict bound: no replica gets
more than a quarter above the average load, so that a prefix that all requests share spreads over as many
replicas as necessary.

Candidates are the replicas known to have a prefix of the request, and two that its digest leads to on a ring
(all, if there are few). A choice therefore costs the same for four replicas and for a thousand, and adding or
removing a replica only changes the routes of its own share.

Nothing here waits, and there is no clock and no randomness: the same state gives the same answer.
"""

from bisect import bisect, insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from math import ceil

from msgspec import Struct

from dragoman.routing.key import DIGEST_BITS, RoutingKey, digest_hint

LOAD_TOKENS = 128
"""Cost of one more running request at a replica, in tokens to compute."""
HINT_TOKENS = 4096
"""Value, in tokens, of a client's hint that its conversation is at a replica."""
SPREAD = 1.25
"""Maximum load of a replica, relative to the average."""
SLACK = 4
"""Number of requests that a replica may have whatever the average is."""
FEW = 8
"""Up to this number of replicas, all are candidates."""
HOMES = 4
"""Maximum number of replicas remembered per prefix."""
POINTS = 32
"""Points of each replica on the ring."""
MOST_KEPT = 256 * 1024
"""Maximum number of remembered prefixes, at about 100 bytes each."""
MOST_NEWS = 4096


class RoutedReplica(Struct):
    name: str
    number: int
    """New after each restart: what is remembered of an earlier number is invalid."""
    running: int = 0
    draining: bool = False
    sole: tuple[int, ...] = ()
    """Shared tuple for the common case of a prefix at one replica only."""


class Router:
    def __init__(self, most: int = MOST_KEPT) -> None:
        self._replicas: dict[str, RoutedReplica] = {}
        self._by_number: dict[int, RoutedReplica] = {}
        self._ring: list[tuple[int, str]] = []
        self._total = 0
        """Running requests of all replicas together."""
        self._open = 0
        """Number of replicas that are not draining."""
        self._numbers = 0
        # Used entries are in the young half. When that is full, the old half is dropped and the young one
        # becomes the old: approximately LRU, without a list.
        self._most = max(most // 2, 1)
        self._young: dict[int, tuple[int, ...]] = {}
        self._old: dict[int, tuple[int, ...]] = {}
        self._news: deque[tuple[int, str]] = deque(maxlen=MOST_NEWS)
        self._told = 0

    # Replicas

    @property
    def names(self) -> list[str]:
        return [*self._replicas]

    @property
    def kept(self) -> int:
        """Number of remembered prefixes."""
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
        """The replica has lost its cache. Its requests from other routers still run."""
        replica = self._replicas[name]
        del self._by_number[replica.number]
        self._live(replica)

    def drain(self, name: str, draining: bool = True) -> None:
        """Stop sending new requests to the replica, if there is another."""
        replica = self._replicas[name]
        self._open += replica.draining - draining
        replica.draining = draining

    def _live(self, replica: RoutedReplica) -> None:
        self._numbers += 1
        replica.number, replica.sole = self._numbers, (self._numbers,)
        self._replicas[replica.name] = self._by_number[replica.number] = replica

    # Selection

    def rank(self, key: RoutingKey, avoid: Collection[str] = ()) -> list[str]:
        """Return replica names, best first; at least one if there is any. Names to avoid come only if there
        are no others.

        The first has capacity within the bound, unless only those to avoid have.
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
        ranked = [name for _, _, name in sorted(fine)] + [name for _, _, name in sorted(full)]
        return ranked if ranked or not avoid else self.rank(key)

    def bound(self) -> int:
        """Return how many requests a replica may have, the next one included."""
        return max(SLACK, ceil(SPREAD * (self._total + 1) / max(self._open or len(self._replicas), 1)))

    def _candidates(self, key: RoutingKey, known: Mapping[int, int]) -> Iterator[RoutedReplica]:
        """Yield replicas that know a prefix or hint of the request, then the others in ring order."""
        for number in known:
            replica = self._by_number[number]
            if not (replica.draining and self._open):
                yield replica
        for replica in self._walk(key.ring_position):
            if replica.number not in known and not (replica.draining and self._open):
                yield replica

    def _known(self, key: RoutingKey) -> dict[int, int]:
        """Return the replicas that have a prefix, with its number of tokens."""
        known: dict[int, int] = {}
        for tokens, digest in reversed(key.prefix_digests):
            for number in self._find(digest):
                if number not in known and number in self._by_number:
                    known[number] = tokens
            if len(known) >= HOMES:
                break
        for hint in key.hints:
            homes = [number for number in self._find(hint) if number in self._by_number]
            if homes:
                # The newest: the replica that answered last has the longest prefix.
                known[homes[0]] = known.get(homes[0], 0) + HINT_TOKENS
                break
        return known

    def _find(self, digest: int) -> tuple[int, ...]:
        return self._young.get(digest) or self._old.get(digest) or ()

    def _walk(self, home: int) -> Iterator[RoutedReplica]:
        """Yield all replicas in ring order from this position."""
        start, count = bisect(self._ring, (home, "")), len(self._ring)
        seen = set[str]()
        for step in range(count):
            name = self._ring[(start + step) % count][1]
            if name not in seen:
                seen.add(name)
                yield self._replicas[name]

    # Running requests and remembered prefixes

    def begin(self, key: RoutingKey, name: str) -> None:
        """Record that the replica gets the request: it will have computed all of it."""
        replica = self._replicas[name]
        replica.running += 1
        self._total += 1
        for digest in (*key.remembered_digests, *key.hints):
            self._tell(digest, replica)

    def end(self, name: str) -> None:
        replica = self._replicas.get(name)
        if replica is not None and replica.running:
            replica.running -= 1
            self._total -= 1

    def set_load(self, name: str, running: int) -> None:
        """Set the load that the replica reports itself, if other routers use it as well."""
        replica = self._replicas[name]
        self._total += running - replica.running
        replica.running = running

    def remember(self, hint: str, name: str, owner: str = "") -> None:
        """Remember a hint that a client may send next time: the id of a response that this replica made."""
        self._tell(digest_hint(hint, owner), self._replicas[name])

    def _tell(self, digest: int, replica: RoutedReplica) -> None:
        if self._keep(digest, replica):
            self._news.append((digest, replica.name))
            self._told += 1

    def _keep(self, digest: int, replica: RoutedReplica) -> bool:
        """Record where a prefix is; return whether that was new."""
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

    # Updates between routers

    def updates_since(self, since: int = 0) -> tuple[int, list[tuple[int, str]]]:
        """Return what was remembered since an update number, as far as it is kept, and the number for next
        time.
        """
        fresh = min(self._told - since, len(self._news))
        return self._told, [*self._news][len(self._news) - fresh :] if fresh > 0 else []

    def apply_updates(self, news: Iterable[tuple[int, str]]) -> None:
        """Apply what another router remembers. It is not forwarded: each router sends its updates to all."""
        for digest, name in news:
            if (replica := self._replicas.get(name)) is not None:
                self._keep(digest, replica)


def _points(name: str) -> Iterator[int]:
    for number in range(POINTS):
        digest = blake2b(f"{name} {number}".encode(), digest_size=8).digest()
        yield int.from_bytes(digest, "little") >> (64 - DIGEST_BITS)
