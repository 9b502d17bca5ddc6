"""From a row of logits to an id, for every engine that has the logits in its hands."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]
Weights: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int32]
Places: TypeAlias = NDArray[np.intp]
Edit: TypeAlias = Callable[[Logits, Sequence[int]], None]
"""Changes a row in place, given the ids generated so far."""


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
