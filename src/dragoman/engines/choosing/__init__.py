"""From a row of logits to an id, for every engine that has the logits in its hands."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]
Weights: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int32]
Places: TypeAlias = NDArray[np.intp]


class Change(Struct, eq=False):
    """What a rule does to a row before an id is chosen from it, as data: rows may be on another device."""

    places: Places
    """Ids, each of them once."""
    amounts: Logits | None = None
    """What is added to each."""
    factor: float = 1.0
    """What is above zero is divided by it, and the rest multiplied."""
    alone: bool = False
    """Whether all others are forbidden."""


Edit: TypeAlias = Callable[[Sequence[int]], Sequence[Change]]
"""A rule: what it changes next, given the ids generated so far. It is asked once for each id."""


@runtime_checkable
class BitMasking(Protocol):
    """A matcher that can tell its mask as bits, for rows that are on another device."""

    def words(self) -> Any:
        """One bit an id, those that may come next set, in a numpy array of 32 bits each; an empty one where
        nothing is forbidden, and None where that takes the row itself."""


class RowRules(Struct, eq=False):
    """All that changes one row: the changes in their order, and then the ids that a constraint lets pass."""

    changes: list[Change]
    words: NDArray[np.uint32] | None = None
    """One bit an id."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[str, Weights] = {}


_kept = _Kept()


def scratch(size: int, use: str = "weights") -> Weights:
    """Room for what is of no use after the call: the same memory for each use, each thread its own.

    New memory for a whole row is mapped page by page while it is filled, which costs more than the filling.
    """
    array = _kept.arrays.get(use)
    if array is None or array.size < size:
        array = _kept.arrays[use] = np.empty(size, np.float32)
    return array[:size]
