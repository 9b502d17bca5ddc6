"""The tensors of a GGUF file as constants of an OpenVINO graph.

In large files, evenly spaced 4-bit weights stay as they are, unless they are to be widened. All other
quantized weights become int8 in groups with one scale each: a value changes by at most 1/254 of the largest
in its group. Groups of 32 match those of the files; without 4-bit weights larger groups are faster.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import Q4_K, dequantize
from msgspec import Struct
from numpy.typing import NDArray

# 8-bit weights, in groups that share a scale.


def as_int8(values: NDArray[np.floating]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Quantize [rows, groups, numbers] to int8; returns them and their scales, [rows, groups, 1]."""
    scales = (np.abs(values).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    # A group of zeros, or of numbers too small for a scale, becomes zero.
    divisors = np.where(scales == 0, np.inf, scales.astype(np.float32))
    return np.rint(values / divisors).clip(-127, 127).astype(np.int8), scales


# 4-bit weights, which keep the bits that they have in the file.
#
# Files have them in groups of 32: a number `q` of 0 to 15 represents `scale * q + least`, where Q4_0 has no
# `least` of its own: it is always `-8 * scale`. The runtime's fast product takes numbers of -8 to 7 and a
# scale for each group, `scale * (q - 8)`. The remaining offset, `least + 8 * scale`, is one number for a
# whole group, so its part of a product is the offset times the sum of the group's 32 inputs: a second
# product, with a thirty-second of the numbers. Offsets are near zero, since weights are as often negative as
# positive, so 8 bits suffice for them.


Node: TypeAlias = Any
Bytes: TypeAlias = NDArray[np.uint8]
Float32s: TypeAlias = NDArray[np.float32]
GROUP = 32
_MIDDLE, _LOW, _HALF = np.uint8(8), np.uint8(15), np.uint8(4)
_SCALES = 12
"""Bytes of the scales and minima in a block of Q4_K."""


class FourBitRows(Struct, frozen=True):
    numbers: Bytes
    """[rows, groups, 16]: two numbers per byte, the first in its lower half."""
    scales: NDArray[np.float16]
    """[rows, groups, 1]"""
    offsets: Float32s
    """[rows, groups]: the value of each group's middle."""


def read_fours(data: Bytes, kind: GGMLQuantizationType) -> FourBitRows:
    """Read rows of a tensor with the bits of the file."""
    return _READERS[kind](data)


def is_four_bits(kind: GGMLQuantizationType) -> bool:
    return kind in _READERS


def multiply_fours(states: Node, parts: Sequence[FourBitRows]) -> Node:
    """Multiply the states with the weights of all parts, stacked vertically."""
    numbers, scales, offsets = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("numbers", "scales", "offsets")
    )
    result = ops.matmul(states, _four_bit_matrix(numbers, scales), False, True)
    return ops.add(result, _product_of_offsets(states, offsets)) if offsets.any() else result


def _four_bit_matrix(numbers: Bytes, scales: NDArray[np.float16]) -> Node:
    rows, groups, _ = numbers.shape
    packed = ov.Tensor(numbers.reshape(-1), ov.Shape([rows, groups, GROUP]), ov.Type.i4)
    scaled = ops.multiply(ops.convert(ops.constant(packed, shared_memory=False), "f16"), ops.constant(scales))
    return ops.convert(ops.reshape(scaled, np.array([rows, -1], np.int64), False), "f32")


def _product_of_offsets(states: Node, offsets: Float32s) -> Node:
    groups = offsets.shape[1]
    split = ops.reshape(states, np.array([0, 0, groups, GROUP], np.int64), True)
    sums = ops.reduce_sum(split, np.array([-1], np.int64), False)
    numbers, scales = as_int8(offsets[:, None])
    weights = ops.multiply(ops.convert(ops.constant(numbers[:, 0]), "f16"), ops.constant(scales[:, 0]))
    return ops.matmul(sums, ops.convert(weights, "f32"), False, True)


def _q4_0(data: Bytes) -> FourBitRows:
    blocks = data.reshape(len(data), -1, 18)
    none = np.zeros(blocks.shape[:2], np.float32)
    return FourBitRows(_pack(*_halves(blocks[..., 2:])), _half_floats(blocks, 0), none)


def _q4_1(data: Bytes) -> FourBitRows:
    blocks = data.reshape(len(data), -1, 20)
    scales, least = _half_floats(blocks, 0), _half_floats(blocks, 2)
    return FourBitRows(_pack(*_halves(blocks[..., 4:])), scales, _offsets(scales, least.astype(np.float32)))


def _q4_k(data: Bytes) -> FourBitRows:
    """Read blocks of eight groups, whose scales and minima are six bits times a number of the block."""
    rows = len(data)
    blocks = data.reshape(-1, 4 + _SCALES + 128)
    scale, least = (_half_floats(blocks, at).astype(np.float32) for at in (0, 2))
    times, minima = Q4_K.get_scale_min(blocks[:, 4 : 4 + _SCALES])
    scales = (scale * times).astype(np.float16).reshape(rows, -1, 1)
    offsets = _offsets(scales, (-least * minima).reshape(rows, -1, 1))
    # 32 bytes are two groups: the lower halves, then the upper ones.
    first, second = _halves(blocks[:, 4 + _SCALES :].reshape(-1, 4, GROUP))
    groups = np.stack([first, second], axis=2).reshape(rows, -1, GROUP)
    return FourBitRows(_pack(groups[..., :16], groups[..., 16:]), scales, offsets)


_READERS: dict[GGMLQuantizationType, Callable[[Bytes], FourBitRows]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q4_K: _q4_k,
}


def _halves(data: Bytes) -> tuple[Bytes, Bytes]:
    return data & _LOW, data >> _HALF


def _pack(first: Bytes, second: Bytes) -> Bytes:
    """Pack numbers of 0 to 15, the first and second halves of groups, two per byte as -8 to 7."""
    numbers = np.concatenate([first, second], axis=-1) ^ _MIDDLE
    packed: Bytes = numbers[..., ::2] | numbers[..., 1::2] << _HALF
    return packed


def _half_floats(blocks: Bytes, at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _offsets(scales: NDArray[np.float16], least: Float32s) -> Float32s:
    array: Float32s = (least + float(_MIDDLE) * scales.astype(np.float32))[..., 0]
    return array


# All tensors.

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Callback with the bytes done and the bytes in total."""
FINE, COARSE = 32, 64
"""Numbers that share a scale; the activations they meet are quantized in groups of the same size. Larger
ones would be faster still, by a tenth with 128; but with 192 the perplexity of a small model went up by
0.8 %.
"""
LARGE = 256 << 20
"""Bytes. The weights of smaller files stay in the CPU's caches, and there int8 is faster for many rows."""
_PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
# Rows that are converted to floats at a time, so that a large table does not need four times its memory.
_ROWS = 4096


class MatrixPart(Struct, frozen=True):
    """A weight by name.

    `paired_heads` is the number of heads in which adjacent rows are rotated together; they are moved half a
    head apart, as the graph's rotation expects.
    """

    name: str
    paired_heads: int = 0


class GraphWeights:
    """Weights by name. Each may be read once; `told` is called with the progress."""

    def __init__(self, path: Path, function: ProgressCallback, *, wide: bool = False) -> None:
        """`wide`: 4-bit weights become int8 as well, which is faster for many rows and takes more memory."""
        reader = GGUFReader(path)
        self._found = {tensor.name: tensor for tensor in reader.tensors}
        self._total = sum(int(tensor.n_bytes) for tensor in reader.tensors)
        widths = [int(tensor.shape[0]) for tensor in reader.tensors if len(tensor.shape) > 1]
        self.has_four_bits = self._total >= LARGE and any(map(_has_four_bits, reader.tensors))
        """Whether there are 4-bit weights to keep."""
        self._keeps_four_bits = self.has_four_bits and not wide
        fine = self._keeps_four_bits or any(width % COARSE for width in widths)
        self.group = FINE if fine else COARSE
        """Group size of the layers. Tensors outside of the layers, whose errors nothing compensates, use
        `FINE`.
        """
        self._done = 0
        self._told = function
        self.metadata: Mapping[str, Any] = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("tokenizer.")
        }

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def outputs(self, name: str) -> int:
        return int(self._found[name].shape[1])

    def vector(self, name: str) -> NDArray[np.float32]:
        tensor = self._take(name)
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)

    def table(self, name: str) -> Node:
        """Return weights with one row per token."""
        return _matrix([_rows(self._take(name))], FINE)

    def product(self, states: Node, *parts: MatrixPart) -> Node:
        """Multiply the states with the weights of all parts, [outputs, inputs], stacked vertically."""
        rows = [_rows(self._take(part.name), part.paired_heads) for part in parts]
        products = []
        for has_four_bits, alike in groupby(rows, _has_four_bits):
            if has_four_bits and self._keeps_four_bits:
                fours = [read_fours(each.data, each.tensor_type) for each in alike]
                products.append(multiply_fours(states, fours))
            else:
                products.append(ops.matmul(states, _matrix([*alike], self.group), False, True))
        return products[0] if len(products) == 1 else ops.concat(products, -1)

    def experts(self, name: str) -> Node:
        """Return weights of [experts, outputs, inputs]."""
        tensor = self._take(name)
        count, outputs = tensor.data.shape[:2]
        rows = _Rows(tensor.data.reshape(count * outputs, -1), tensor.tensor_type)
        numbers, scales = _group(rows, self.group)
        shape = (count, outputs, -1)
        return _scale(numbers.reshape(*shape, self.group), scales.reshape(*shape, 1))

    def _take(self, name: str) -> Any:
        tensor = self._found[name]
        self._done += int(tensor.n_bytes)
        self._told(self._done, self._total)
        return tensor


class _Rows(Struct, frozen=True):
    """Rows of a tensor, as they are in the file."""

    data: NDArray[Any]
    tensor_type: GGMLQuantizationType


def int8_matrix(values: NDArray[np.float32], group: int) -> Node:
    """Return a matrix of [outputs, inputs] whose weights come from no file."""
    return _scale(*as_int8(values.reshape(len(values), -1, group)))


def _rows(tensor: Any, paired_heads: int = 0) -> _Rows:
    order = half_apart(int(tensor.shape[1]), paired_heads) if paired_heads else slice(None)
    return _Rows(tensor.data[order], tensor.tensor_type)


def _has_four_bits(rows: Any) -> bool:
    return is_four_bits(rows.tensor_type)


def _matrix(rows: Sequence[_Rows], group: int) -> Node:
    if any(each.tensor_type in _PLAIN for each in rows):
        values = [dequantize(each.data, each.tensor_type).astype(np.float16) for each in rows]
        return ops.convert(ops.constant(np.concatenate(values)), "f32")
    grouped = [_group(each, group) for each in rows]
    numbers, scales = (np.concatenate(each) for each in zip(*grouped, strict=True))
    return _scale(numbers, scales)


def _scale(numbers: NDArray[np.int8], scales: NDArray[np.float16]) -> Node:
    """Convert [..., outputs, groups, numbers] to floats of [..., outputs, inputs]."""
    scaled = ops.multiply(ops.convert(ops.constant(numbers), "f16"), ops.constant(scales))
    return ops.convert(ops.reshape(scaled, np.array([*numbers.shape[:-2], -1], np.int64), False), "f32")


def _group(rows: _Rows, group: int) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Convert rows of any quantization to int8, [rows, groups, numbers], and their scales, [rows, groups,
    1].
    """
    starts = range(0, len(rows.data), _ROWS)
    values = (dequantize(rows.data[start : start + _ROWS], rows.tensor_type) for start in starts)
    pieces = [as_int8(each.reshape(len(each), -1, group)) for each in values]
    return np.concatenate([piece[0] for piece in pieces]), np.concatenate([piece[1] for piece in pieces])


def half_apart(rows: int, heads: int) -> NDArray[np.intp]:
    """Return the row order that moves pairs half a head apart: `half_apart(4, 1)` is `0, 2, 1, 3`."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
