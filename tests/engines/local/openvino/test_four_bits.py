"""Weights of four bits keep them, and products with them are those of the file's numbers."""

import numpy as np
import openvino as ov
import openvino.opset15 as ops
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from dragoman.engines.local.openvino import tensors

Q4_0, Q4_1, Q4_K = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K
KINDS = [Q4_0, Q4_1, Q4_K]
WIDTH = 512


def rows(kind: GGMLQuantizationType, count: int = 6) -> NDArray[np.uint8]:
    """As they would be in a file."""
    random = np.random.default_rng(5)
    if kind != Q4_K:
        return np.asarray(quantize(random.normal(size=(count, WIDTH)).astype(np.float32), kind), np.uint8)
    blocks = random.integers(0, 256, (count, WIDTH // 256, 144), dtype=np.uint8)
    blocks[..., :4] = random.uniform(0.001, 0.01, (count, WIDTH // 256, 2)).astype(np.float16).view(np.uint8)
    return blocks.reshape(count, -1)


def values(fours: tensors.FourBitRows) -> NDArray[np.float32]:
    pairs = np.stack([fours.numbers & 15, fours.numbers >> 4], axis=-1).astype(np.int8)
    numbers = np.where(pairs > 7, pairs - 16, pairs).reshape(*fours.numbers.shape[:2], tensors.GROUP)
    array = numbers * fours.scales.astype(np.float32) + fours.offsets[..., None]
    return array.reshape(len(numbers), -1)


@pytest.mark.parametrize("kind", [Q4_0, Q4_1])
def test_a_number_stays_what_it_is(kind: GGMLQuantizationType) -> None:
    data = rows(kind)
    assert np.array_equal(values(tensors.read_fours(data, kind)), dequantize(data, kind))


def test_a_scale_of_two_factors_is_rounded_to_eleven_bits() -> None:
    data = rows(Q4_K)
    exact = dequantize(data, Q4_K)
    assert np.abs(values(tensors.read_fours(data, Q4_K)) - exact).max() <= np.abs(exact).max() * 2**-11


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_numbers(kind: GGMLQuantizationType) -> None:
    data = rows(kind)
    states = ops.parameter([-1, -1, WIDTH], np.float32)
    result = tensors.multiply_fours(states, [tensors.read_fours(data, kind)])
    whole = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = ov.Core().compile_model(ov.Model([ops.result(result)], [states]), "CPU", whole)
    array = np.random.default_rng(6).normal(size=(3, 1, WIDTH)).astype(np.float32)
    exact = array @ dequantize(data, kind).T
    assert np.abs(compiled(array)[0] - exact).max() < 0.03 * exact.std()


def test_parts_with_and_without_offsets_are_one_product() -> None:
    states = ops.parameter([-1, -1, WIDTH], np.float32)
    parts = [tensors.read_fours(rows(kind), kind) for kind in (Q4_0, Q4_1)]
    assert tensors.multiply_fours(states, parts).output(0).partial_shape[-1].get_length() == 12
