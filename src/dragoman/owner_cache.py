"""A cache of recently used values per owner, with one weight limit for all owners together."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


class OwnerCache(Generic[V]):
    """Weight-bounded cache, safe for threads. The heaviest owner's least recently used values are evicted
    first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[str, OrderedDict[Hashable, tuple[V, int]]] = {}
        self._weights: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __contains__(self, owner: str) -> bool:
        return owner in self._kept

    def get(self, owner: str, key: Hashable) -> V | None:
        mine = self._kept.get(owner)
        kept = mine.get(key) if mine else None
        return kept[0] if kept else None

    def pop(self, owner: str, key: Hashable) -> V | None:
        with self._lock:
            mine = self._kept.get(owner)
            value, weight = mine.pop(key, (None, 0)) if mine else (None, 0)
            self._weights[owner] -= weight
            return value

    def all(self, owner: str) -> Iterator[tuple[Hashable, V]]:
        with self._lock:
            mine = [*self._kept.get(owner, {}).items()]
        return ((key, value) for key, (value, _) in mine)

    def put(self, owner: str, key: Hashable, value: V, weight: int, instead: Hashable = None) -> None:
        """Store a value; `instead` names an older one that it replaces, such as an earlier state of a
        conversation.
        """
        with self._lock:
            mine = self._kept.setdefault(owner, OrderedDict())
            for each in (instead, key):
                _, gone = mine.pop(each, (None, 0))
                self._weights[owner] -= gone
            mine[key] = value, weight
            self._weights[owner] += weight
            while self._weights.total() > self._most:
                self._drop(max(self._weights, key=self._weights.__getitem__))

    def _drop(self, owner: str) -> None:
        _, (_, weight) = self._kept[owner].popitem(last=False)
        self._weights[owner] -= weight
        if not self._kept[owner]:
            del self._kept[owner], self._weights[owner]

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))
