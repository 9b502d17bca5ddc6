"""Sampling: from a row of logits to an id, for every engine that has access to the logits."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]
RelativeProbs: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int32]
Indices: TypeAlias = NDArray[np.intp]


class LogitsChange(Struct, eq=False):
    """A change to a row before sampling, as data, because rows may be on another device."""

    ids: Indices
    """Ids, each at most once."""
    amounts: Logits | None = None
    """The amount added to each."""
    factor: float = 1.0
    """Divisor for values above zero, and factor for the rest."""
    alone: bool = False
    """Whether all other ids are forbidden."""


LogitsProcessor: TypeAlias = Callable[[Sequence[int]], Sequence[LogitsChange]]
"""A logits processor: returns its next changes, given the ids generated so far. Called once for each id."""


@runtime_checkable
class BitmaskMatcher(Protocol):
    """A matcher that can return its mask as bits, for rows on another device."""

    def bitmask(self) -> Any:
        """Return one bit per id, set for those that may come next, in a numpy array of 32-bit words; an
        empty array if nothing is forbidden, and None if the mask can only be applied to the row itself.
        """


class RowChanges(Struct, eq=False):
    """All changes to one row: those of the processors in order, and then the constraint's mask."""

    changes: list[LogitsChange]
    bitmask: NDArray[np.uint32] | None = None
    """One bit per id."""


class _ScratchArrays(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[str, RelativeProbs] = {}


_kept = _ScratchArrays()


def scratch(size: int, use: str = "weights") -> RelativeProbs:
    """Return scratch memory that is reused by the next call with the same `use` on this thread.

    New memory for a whole row is mapped page by page while it is filled, which costs more than the filling.
    """
    array = _kept.arrays.get(use)
    if array is None or array.size < size:
        array = _kept.arrays[use] = np.empty(size, np.float32)
    return array[:size]
