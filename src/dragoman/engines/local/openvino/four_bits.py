"""Weights of four bits, which keep the bits that they have in the file.

Files have them in groups of 32: a number `q` of 0 to 15 stands for `scale * q + least`, where Q4_0 has no
`least` of its own: it is always `-8 * scale`. The runtime's fast product knows numbers of -8 to 7 and a scale
for each group, `scale * (q - 8)`. What that leaves out, `least + 8 * scale`, is one number for a whole group,
so it takes part in a product as itself times the sum of the 32 states that it meets: a second product, with a
thirty-second of the numbers. They are near zero, since weights are as often negative as positive, so eight
bits do for them.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from gguf import GGMLQuantizationType
from gguf.quants import Q4_K
from msgspec import Struct
from numpy.typing import NDArray

from dragoman.engines.local.openvino.int8 import as_int8

Node: TypeAlias = Any
Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
GROUP = 32
_MIDDLE, _LOW, _HALF = np.uint8(8), np.uint8(15), np.uint8(4)
_SCALES = 12
"""Bytes of the scales and minima in a block of Q4_K."""


class Fours(Struct, frozen=True):
    numbers: Bytes
    """[rows, groups, 16]: two numbers a byte, the first in its lower half."""
    scales: NDArray[np.float16]
    """[rows, groups, 1]"""
    offsets: Floats
    """[rows, groups]: what the middle of each group is."""


def read(data: Bytes, kind: GGMLQuantizationType) -> Fours:
    """Rows of a tensor as they are in the file."""
    return _READERS[kind](data)


def is_four_bits(kind: GGMLQuantizationType) -> bool:
    return kind in _READERS


def product(states: Node, parts: Sequence[Fours]) -> Node:
    """The states times the weights of all parts, one below the other."""
    numbers, scales, offsets = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("numbers", "scales", "offsets")
    )
    found = ops.matmul(states, _matrix(numbers, scales), False, True)
    return ops.add(found, _product_of_offsets(states, offsets)) if offsets.any() else found


def _matrix(numbers: Bytes, scales: NDArray[np.float16]) -> Node:
    rows, groups, _ = numbers.shape
    packed = ov.Tensor(numbers.reshape(-1), ov.Shape([rows, groups, GROUP]), ov.Type.i4)
    scaled = ops.multiply(ops.convert(ops.constant(packed, shared_memory=False), "f16"), ops.constant(scales))
    return ops.convert(ops.reshape(scaled, np.array([rows, -1], np.int64), False), "f32")


def _product_of_offsets(states: Node, offsets: Floats) -> Node:
    groups = offsets.shape[1]
    split = ops.reshape(states, np.array([0, 0, groups, GROUP], np.int64), True)
    sums = ops.reduce_sum(split, np.array([-1], np.int64), False)
    numbers, scales = as_int8(offsets[:, None])
    weights = ops.multiply(ops.convert(ops.constant(numbers[:, 0]), "f16"), ops.constant(scales[:, 0]))
    return ops.matmul(sums, ops.convert(weights, "f32"), False, True)


def _q4_0(data: Bytes) -> Fours:
    blocks = data.reshape(len(data), -1, 18)
    none = np.zeros(blocks.shape[:2], np.float32)
    return Fours(_packed(*_halves(blocks[..., 2:])), _half_floats(blocks, 0), none)


def _q4_1(data: Bytes) -> Fours:
    blocks = data.reshape(len(data), -1, 20)
    scales, least = _half_floats(blocks, 0), _half_floats(blocks, 2)
    return Fours(_packed(*_halves(blocks[..., 4:])), scales, _offsets(scales, least.astype(np.float32)))


def _q4_k(data: Bytes) -> Fours:
    """Blocks of eight groups, whose scales and minima are six bits times a number of the block."""
    rows = len(data)
    blocks = data.reshape(-1, 4 + _SCALES + 128)
    scale, least = (_half_floats(blocks, at).astype(np.float32) for at in (0, 2))
    times, minima = Q4_K.get_scale_min(blocks[:, 4 : 4 + _SCALES])
    scales = (scale * times).astype(np.float16).reshape(rows, -1, 1)
    offsets = _offsets(scales, (-least * minima).reshape(rows, -1, 1))
    # 32 bytes are two groups: the lower halves, then the upper ones.
    first, second = _halves(blocks[:, 4 + _SCALES :].reshape(-1, 4, GROUP))
    groups = np.stack([first, second], axis=2).reshape(rows, -1, GROUP)
    return Fours(_packed(groups[..., :16], groups[..., 16:]), scales, offsets)


_READERS: dict[GGMLQuantizationType, Callable[[Bytes], Fours]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q4_K: _q4_k,
}


def _halves(data: Bytes) -> tuple[Bytes, Bytes]:
    return data & _LOW, data >> _HALF


def _packed(first: Bytes, second: Bytes) -> Bytes:
    """Numbers of 0 to 15, the first and second halves of groups, as neighbours in a byte, of -8 to 7."""
    numbers = np.concatenate([first, second], axis=-1) ^ _MIDDLE
    packed: Bytes = numbers[..., ::2] | numbers[..., 1::2] << _HALF
    return packed


def _half_floats(blocks: Bytes, at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _offsets(scales: NDArray[np.float16], least: Floats) -> Floats:
    found: Floats = (least + float(_MIDDLE) * scales.astype(np.float32))[..., 0]
    return found
