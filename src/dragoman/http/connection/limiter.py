"""Limits connections, in total and per API key, and closes idle ones to make room for new ones.

Connections cost a client nothing, so one client must not use up those of others. A connection on which no key
was sent yet is unauthenticated: these may use half of the connections, and above that the oldest is closed.
At the total limit, a connection without active requests is closed: an unauthenticated one, or the longest
idle one of the key with the most. With several keys, each may have half of the connections, and half of a
key's connections may be WebSockets, which are never idle.
"""

import asyncio
import resource
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

from dragoman.errors import Overloaded

OTHER_FILES = 128
"""File descriptors reserved for everything else: the store, the engine, files."""


def room(most: int) -> int:
    """Return the limit of connections, reduced to the available file descriptors."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else max(1, min(most, files - OTHER_FILES))


class ConnectionLimiter:
    def __init__(self, most: int, keys: int) -> None:
        self.most = most
        self.most_strangers = max(1, most // 2)
        self.set_key_count(keys)
        self.of_key: Counter[str] = Counter()
        self.sockets: Counter[str] = Counter()
        self.strangers: dict[CountedConnection, None] = {}
        self.resting: defaultdict[str, dict[CountedConnection, None]] = defaultdict(dict)

    def set_key_count(self, keys: int) -> None:
        self.most_of_key = self.most if keys < 2 else max(1, self.most // 2)
        self.most_sockets = max(1, self.most_of_key // 2)

    def enter(self, give_way: Callable[[], None]) -> "CountedConnection | None":
        """Add a connection, or return None if there is no room; `evict` is called to close it."""
        if len(self.strangers) >= self.most_strangers:
            next(iter(self.strangers)).evict()
        elif len(self.strangers) + self.of_key.total() >= self.most and not self._make_room():
            return None
        connection = CountedConnection(self, give_way)
        self.strangers[connection] = None
        return connection

    def _make_room(self) -> bool:
        if self.strangers:
            next(iter(self.strangers)).evict()
            return True
        return any(self.make_room_of(owner) for owner, _ in self.of_key.most_common())

    def make_room_of(self, owner: str) -> bool:
        """Close the longest idle connection of a key; return whether there was one."""
        longest = next(iter(self.resting[owner]), None) if owner in self.resting else None
        if longest is not None:
            longest.evict()
        return longest is not None


class CountedConnection:
    """One connection. Call `leave` when it is over; a second call has no effect."""

    def __init__(self, limiter: ConnectionLimiter, give_way: Callable[[], None]) -> None:
        self._limiter = limiter
        self._close = give_way
        self._owner: str | None = None
        self._is_socket = False
        self._left = False
        self._watching: dict[object, Callable[[], None]] = {}

    def watch(self, call: Callable[[], None]) -> Callable[[], object]:
        """Call `call` when the connection is over, unless the returned function is called first."""
        watcher = object()
        self._watching[watcher] = call
        if self._left:
            self._tell()
        return partial(self._watching.pop, watcher, None)

    def set_owner(self, owner: str) -> None:
        """Assign the connection to a key; raise if the key has too many."""
        if owner == self._owner or self._left:
            return
        limiter = self._limiter
        if limiter.of_key[owner] >= limiter.most_of_key and not limiter.make_room_of(owner):
            raise Overloaded(
                f"This API key has {limiter.most_of_key} connections, all of them active; close one."
            )
        self._forget()
        self._owner = owner
        limiter.of_key[owner] += 1
        if self._is_socket:
            limiter.sockets[owner] += 1

    def open_socket(self) -> None:
        """Mark the connection as a WebSocket; raise if its key has too many."""
        owner, limiter = self._owner or "", self._limiter
        if limiter.sockets[owner] >= limiter.most_sockets:
            raise Overloaded(f"This API key has {limiter.most_sockets} WebSockets; close one.")
        limiter.sockets[owner] += 1
        self._is_socket = True

    def mark_busy(self) -> None:
        """Mark the connection as active: a request has begun."""
        self._wake()

    def mark_idle(self) -> None:
        """Mark the connection as idle: every request was answered."""
        if self._owner is not None and not self._left:
            self._limiter.resting[self._owner][self] = None

    def leave(self) -> None:
        if not self._left:
            self._forget()
            self._left = True
            self._tell()

    def _tell(self) -> None:
        """Schedule the callbacks; a watcher may be in the middle of something else."""
        if self._watching:
            asyncio.get_running_loop().call_soon(self._tell_all)

    def _tell_all(self) -> None:
        while self._watching:
            _, call = self._watching.popitem()
            call()

    def evict(self) -> None:
        self.leave()
        self._close()

    def become(self, give_way: Callable[[], None]) -> None:
        """Replace the function that closes the connection."""
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
