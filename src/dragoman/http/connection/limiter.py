"""How many connections there are, whose they are, and which gives way where there is no room for more.

A connection costs a client nothing, so it must not cost others theirs. Whoever has shown no key yet is a
stranger: strangers have half of the connections, and of too many the one that came first is closed. When
there are as many as there may be, one gives way on which nobody waits for anything: a stranger's, or that
which has rested longest of the key that has most. Of several keys none has more than half of them, and half
of what a key has may be WebSockets, which never rest.
"""

import asyncio
import resource
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

from dragoman.errors import Overloaded

OTHER_FILES = 128
"""Descriptors that are left for all else: the store, the engine, files."""


def room(most: int) -> int:
    """Connections that there are descriptors for, within the limit."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else max(1, min(most, files - OTHER_FILES))


class ConnectionLimiter:
    def __init__(self, most: int, keys: int) -> None:
        self.most = most
        self.most_strangers = max(1, most // 2)
        self.share_between(keys)
        self.of_key: Counter[str] = Counter()
        self.sockets: Counter[str] = Counter()
        self.strangers: dict[CountedConnection, None] = {}
        self.resting: defaultdict[str, dict[CountedConnection, None]] = defaultdict(dict)

    def share_between(self, keys: int) -> None:
        self.most_of_key = self.most if keys < 2 else max(1, self.most // 2)
        self.most_sockets = max(1, self.most_of_key // 2)

    def enter(self, give_way: Callable[[], None]) -> "CountedConnection | None":
        """A new connection, or None where there is no room; `give_way` is called if it is to be closed."""
        if len(self.strangers) >= self.most_strangers:
            next(iter(self.strangers)).give_way()
        elif len(self.strangers) + self.of_key.total() >= self.most and not self._make_room():
            return None
        connection = CountedConnection(self, give_way)
        self.strangers[connection] = None
        return connection

    def _make_room(self) -> bool:
        if self.strangers:
            next(iter(self.strangers)).give_way()
            return True
        return any(self.make_room_of(owner) for owner, _ in self.of_key.most_common())

    def make_room_of(self, owner: str) -> bool:
        """Closes the connection of a key that has rested longest; whether there was one."""
        longest = next(iter(self.resting[owner]), None) if owner in self.resting else None
        if longest is not None:
            longest.give_way()
        return longest is not None


class CountedConnection:
    """One connection. `leave` is called when it is over, and may be called twice."""

    def __init__(self, limiter: ConnectionLimiter, give_way: Callable[[], None]) -> None:
        self._limiter = limiter
        self._close = give_way
        self._owner: str | None = None
        self._is_socket = False
        self._left = False
        self._watching: dict[object, Callable[[], None]] = {}

    def watch(self, call: Callable[[], None]) -> Callable[[], object]:
        """Has it called when the connection is over, unless what is returned is called before."""
        watcher = object()
        self._watching[watcher] = call
        if self._left:
            self._tell()
        return partial(self._watching.pop, watcher, None)

    def show(self, owner: str) -> None:
        """Its client has shown a key. Raises if that has too many."""
        if owner == self._owner or self._left:
            return
        limiter = self._limiter
        if limiter.of_key[owner] >= limiter.most_of_key and not limiter.make_room_of(owner):
            raise Overloaded(
                f"This key has {limiter.most_of_key} connections, and each is at work; close one of them."
            )
        self._forget()
        self._owner = owner
        limiter.of_key[owner] += 1
        if self._is_socket:
            limiter.sockets[owner] += 1

    def open_socket(self) -> None:
        """It is a WebSocket from now on. Raises if its key has too many."""
        owner, limiter = self._owner or "", self._limiter
        if limiter.sockets[owner] >= limiter.most_sockets:
            raise Overloaded(f"This key has {limiter.most_sockets} WebSockets; close one of them.")
        limiter.sockets[owner] += 1
        self._is_socket = True

    def works(self) -> None:
        """A request is under way."""
        self._wake()

    def rests(self) -> None:
        """Every request was answered."""
        if self._owner is not None and not self._left:
            self._limiter.resting[self._owner][self] = None

    def leave(self) -> None:
        if not self._left:
            self._forget()
            self._left = True
            self._tell()

    def _tell(self) -> None:
        """Not at once: whoever is called may be in the midst of something."""
        if self._watching:
            asyncio.get_running_loop().call_soon(self._tell_all)

    def _tell_all(self) -> None:
        while self._watching:
            _, call = self._watching.popitem()
            call()

    def give_way(self) -> None:
        self.leave()
        self._close()

    def become(self, give_way: Callable[[], None]) -> None:
        """Another looks after the connection from now on."""
        self._close = give_way

    def _forget(self) -> None:
        limiter, owner = self._limiter, self._owner
        if owner is None:
            limiter.strangers.pop(self, None)
            return
        self._wake()
        _count_down(limiter.of_key, owner)
        if self._is_socket:
            _count_down(limiter.sockets, owner)

    def _wake(self) -> None:
        resting, owner = self._limiter.resting, self._owner
        if owner is not None and owner in resting:
            resting[owner].pop(self, None)
            if not resting[owner]:
                del resting[owner]


def _count_down(counter: Counter[str], owner: str) -> None:
    counter[owner] -= 1
    if not counter[owner]:
        del counter[owner]
