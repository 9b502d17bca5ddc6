"""The tensors of a GGUF file as constants of an OpenVINO graph.

What is quantized becomes int8 in groups with a scale each, whatever it was: that is the form for which the
CPU has one fast path for a single row and for hundreds. A value moves by at most 1/254 of the largest in its
group, a thirtieth of a step of 4 bits. Groups of 32 are those of files; groups of 64 are a tenth faster.

Four bits would be faster for one row. But there a group begins at a whole number of steps, which files do not
keep to: rounding that makes perplexity grow by a quarter.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import openvino.opset15 as ops
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from msgspec import Struct
from numpy.typing import NDArray

Node: TypeAlias = Any
Floats: TypeAlias = NDArray[np.floating]
Told: TypeAlias = Callable[[int, int], None]
"""Told the bytes done and the bytes there are."""
FINE, COARSE = 32, 64
"""Numbers that share a scale; the activations they meet are quantized in groups of the same size."""
_PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
# Rows that are widened to floats at a time, so that a large table does not need four times its memory.
_ROWS = 4096


class Part(Struct, frozen=True):
    """A weight by name.

    `paired_heads` says in how many heads neighbouring rows are rotated together; they are put half a head
    apart, which is how the graph rotates.
    """

    name: str
    paired_heads: int = 0


class Tensors:
    """Weights by name. Each may be asked for once; `told` hears how far that has come."""

    def __init__(self, path: Path, told: Told) -> None:
        reader = GGUFReader(path)
        self._found = {tensor.name: tensor for tensor in reader.tensors}
        self._total = sum(int(tensor.n_bytes) for tensor in reader.tensors)
        widths = [int(tensor.shape[0]) for tensor in reader.tensors if len(tensor.shape) > 1]
        self.group = FINE if any(width % COARSE for width in widths) else COARSE
        """Of the layers. What comes before and after them, where no others make up for errors, is fine."""
        self._done = 0
        self._told = told
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
        """The weights of a row for each token."""
        return self._matrix([Part(name)], FINE)

    def matrix(self, *parts: Part) -> Node:
        """Weights of [outputs, inputs], one below the other."""
        return self._matrix(parts, self.group)

    def experts(self, name: str) -> Node:
        """Weights of [experts, outputs, inputs]."""
        tensor = self._take(name)
        count, outputs = tensor.data.shape[:2]
        rows = tensor.data.reshape(count * outputs, -1)
        numbers, scales = _grouped(rows, tensor.tensor_type, self.group)
        shape = (count, outputs, -1)
        return _scaled(numbers.reshape(*shape, self.group), scales.reshape(*shape, 1))

    def _matrix(self, parts: Sequence[Part], group: int) -> Node:
        taken = [(self._take(part.name), part) for part in parts]
        if any(tensor.tensor_type in _PLAIN for tensor, _ in taken):
            values = [dequantize(*_ordered(tensor, part)).astype(np.float16) for tensor, part in taken]
            return ops.convert(ops.constant(np.concatenate(values)), "f32")
        grouped = [_grouped(*_ordered(tensor, part), group) for tensor, part in taken]
        numbers, scales = (np.concatenate(each) for each in zip(*grouped, strict=True))
        return _scaled(numbers, scales)

    def _take(self, name: str) -> Any:
        tensor = self._found[name]
        self._done += int(tensor.n_bytes)
        self._told(self._done, self._total)
        return tensor


def int8_matrix(values: NDArray[np.float32], group: int) -> Node:
    """Weights of [outputs, inputs] that are in no file."""
    return _scaled(*_grouped(values, GGMLQuantizationType.F32, group))


def _scaled(numbers: NDArray[np.int8], scales: NDArray[np.float16]) -> Node:
    """[..., outputs, groups, numbers] as floats of [..., outputs, inputs]."""
    scaled = ops.multiply(ops.convert(ops.constant(numbers), "f16"), ops.constant(scales))
    return ops.convert(ops.reshape(scaled, np.array([*numbers.shape[:-2], -1], np.int64), False), "f32")


def _ordered(tensor: Any, part: Part) -> tuple[NDArray[Any], GGMLQuantizationType]:
    if not part.paired_heads:
        return tensor.data, tensor.tensor_type
    return tensor.data[half_apart(int(tensor.shape[1]), part.paired_heads)], tensor.tensor_type


def _grouped(
    data: NDArray[Any], kind: GGMLQuantizationType, group: int
) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Rows of any quantization as int8, [rows, groups, numbers], and their scales, [rows, groups, 1]."""
    pieces = [_as_int8(data[start : start + _ROWS], kind, group) for start in range(0, len(data), _ROWS)]
    return np.concatenate([piece[0] for piece in pieces]), np.concatenate([piece[1] for piece in pieces])


def _as_int8(
    data: NDArray[Any], kind: GGMLQuantizationType, group: int
) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    values = dequantize(data, kind).reshape(len(data), -1, group)
    scales = (np.abs(values).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    # A group of zeros, or of numbers too small for a scale, is zero.
    divisors = np.where(scales == 0, np.inf, scales.astype(np.float32))
    return np.rint(values / divisors).clip(-127, 127).astype(np.int8), scales


def half_apart(rows: int, heads: int) -> NDArray[np.intp]:
    """`half_apart(4, 1)` is `0, 2, 1, 3`: the pairs 0-1 and 2-3 come to lie half a head apart."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
