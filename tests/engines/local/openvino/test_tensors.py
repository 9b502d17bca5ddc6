"""Weights on their way into the graph: how much they change."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from dragoman.engines.local.openvino.tensors import COARSE, FINE, as_int8, half_apart

KINDS = [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1]


@pytest.mark.parametrize("group", [FINE, COARSE])
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_moves_by_half_a_step_at_most(kind: GGMLQuantizationType, group: int) -> None:
    data = quantize(np.random.default_rng(3).normal(size=(5, 384)).astype(np.float32), kind)
    values = dequantize(data, kind).reshape(5, -1, group)
    numbers, scales = as_int8(values)
    array = numbers * scales.astype(np.float32)
    most = np.abs(values).max(axis=-1, keepdims=True)
    # A scale has eleven bits.
    assert (np.abs(array - values) <= most / 254 * 1.01 + most * 2**-11).all()


def test_zeros_stay_zeros() -> None:
    numbers, scales = as_int8(np.zeros((1, 1, 32), np.float32))
    assert not numbers.any() and np.isfinite(scales).all()


def test_pairs_come_to_lie_half_a_head_apart() -> None:
    assert half_apart(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
