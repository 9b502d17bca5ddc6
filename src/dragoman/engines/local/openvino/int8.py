"""Numbers of eight bits, in groups that share a scale."""

import numpy as np
from numpy.typing import NDArray


def as_int8(values: NDArray[np.floating]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """[rows, groups, numbers] as int8, and their scales, [rows, groups, 1]."""
    scales = (np.abs(values).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    # A group of zeros, or of numbers too small for a scale, is zero.
    divisors = np.where(scales == 0, np.inf, scales.astype(np.float32))
    return np.rint(values / divisors).clip(-127, 127).astype(np.int8), scales
