"""What is chosen from, and what is chosen."""

import threading
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]
Weights: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int32]
Places: TypeAlias = NDArray[np.intp]


class _Kept(threading.local):
    array: Weights = np.empty(0, np.float32)


_kept = _Kept()


def scratch(size: int) -> Weights:
    """Room for what is of no use after the call: the same memory each time, each thread its own.

    New memory for a whole row is mapped page by page while it is filled, which costs more than the filling.
    """
    if _kept.array.size < size:
        _kept.array = np.empty(size, np.float32)
    return _kept.array[:size]
