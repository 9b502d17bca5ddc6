"""Grammars by what was asked for: a long list of tools is made a grammar once, not at every turn."""

from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from threading import Lock
from typing import Any

from msgspec.msgpack import encode

from dragoman.constrain.constraint import Constraint

LEAST_BYTES = 1024
"""Of what is kept beside the text of a grammar."""


class Grammars:
    """Bounded by the bytes of the grammars. Threads may share it."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = Lock()
        self._kept: OrderedDict[bytes, Constraint] = OrderedDict()
        self.bytes = 0

    def get(self, asked: Any, make: Callable[[], Constraint]) -> Constraint:
        """What was made of this before, or is now. `asked` is anything that msgpack can write."""
        key = sha256(encode(asked)).digest()
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
        made = make()
        self._keep(key, made)
        return made

    def _keep(self, key: bytes, made: Constraint) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self.bytes += _size(made)
            while self.bytes > self._most:
                _, dropped = self._kept.popitem(last=False)
                self.bytes -= _size(dropped)


def _size(constraint: Constraint) -> int:
    return LEAST_BYTES + len(constraint.grammar.encode())
