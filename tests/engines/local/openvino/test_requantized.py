"""Weights that the bench puts into another precision are what they were, but for rounding."""

import numpy as np
import pytest
from bench import requantize
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from dragoman.engines.default_weights import default_model


@pytest.mark.parametrize(
    ("kind", "most"), [("Q4_0", 0.1), ("Q4_K", 0.1), ("Q5_K", 0.05), ("Q6_K", 0.025), ("Q8_0", 0.007)]
)
def test_blocks_stand_for_their_numbers(kind: str, most: float) -> None:
    [tensor] = [each for each in GGUFReader(default_model()).tensors if each.name == "blk.7.ffn_down.weight"]
    values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
    used = GGMLQuantizationType[kind]
    result = dequantize(requantize.quantize_rows(values, used), used)
    assert np.sqrt(np.square(result - values).mean() / np.square(values).mean()) < most


def test_zeros_stay_zeros() -> None:
    for kind in map(GGMLQuantizationType.__getitem__, requantize.KINDS):
        rows = requantize.quantize_rows(np.zeros((2, 512), np.float32), kind)
        assert not dequantize(rows, kind).any()
