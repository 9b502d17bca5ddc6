"""The tensors of a GGUF file as constants of an OpenVINO graph.

In large files, what has four bits in even steps keeps them (see four_bits.py). Everything else that is
quantized becomes int8 in groups with a scale each: a value moves by at most 1/254 of the largest in its
group. Groups of 32 are those of files; groups of 64 are a tenth faster, where nothing has four bits.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import openvino.opset15 as ops
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from msgspec import Struct
from numpy.typing import NDArray

from dragoman.engines.local.openvino import four_bits
from dragoman.engines.local.openvino.int8 import as_int8

Node: TypeAlias = Any
Floats: TypeAlias = NDArray[np.floating]
Told: TypeAlias = Callable[[int, int], None]
"""Told the bytes done and the bytes there are."""
FINE, COARSE = 32, 64
"""Numbers that share a scale; the activations they meet are quantized in groups of the same size."""
LARGE = 256 << 20
"""Bytes. Weights of smaller files stay in the caches of the CPU, and there int8 is faster for many rows."""
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
        self._keeps_four_bits = self._total >= LARGE and any(map(_has_four_bits, reader.tensors))
        fine = self._keeps_four_bits or any(width % COARSE for width in widths)
        self.group = FINE if fine else COARSE
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
        return _matrix([_rows(self._take(name))], FINE)

    def product(self, states: Node, *parts: Part) -> Node:
        """The states times the weights of all parts, [outputs, inputs], one below the other."""
        rows = [_rows(self._take(part.name), part.paired_heads) for part in parts]
        products = []
        for has_four_bits, alike in groupby(rows, _has_four_bits):
            if has_four_bits and self._keeps_four_bits:
                fours = [four_bits.read(each.data, each.tensor_type) for each in alike]
                products.append(four_bits.product(states, fours))
            else:
                products.append(ops.matmul(states, _matrix([*alike], self.group), False, True))
        return products[0] if len(products) == 1 else ops.concat(products, -1)

    def experts(self, name: str) -> Node:
        """Weights of [experts, outputs, inputs]."""
        tensor = self._take(name)
        count, outputs = tensor.data.shape[:2]
        rows = _Rows(tensor.data.reshape(count * outputs, -1), tensor.tensor_type)
        numbers, scales = _grouped(rows, self.group)
        shape = (count, outputs, -1)
        return _scaled(numbers.reshape(*shape, self.group), scales.reshape(*shape, 1))

    def _take(self, name: str) -> Any:
        tensor = self._found[name]
        self._done += int(tensor.n_bytes)
        self._told(self._done, self._total)
        return tensor


class _Rows(Struct, frozen=True):
    """Of a tensor, as they are in the file."""

    data: NDArray[Any]
    tensor_type: GGMLQuantizationType


def int8_matrix(values: NDArray[np.float32], group: int) -> Node:
    """Weights of [outputs, inputs] that are in no file."""
    return _scaled(*as_int8(values.reshape(len(values), -1, group)))


def _rows(tensor: Any, paired_heads: int = 0) -> _Rows:
    order = half_apart(int(tensor.shape[1]), paired_heads) if paired_heads else slice(None)
    return _Rows(tensor.data[order], tensor.tensor_type)


def _has_four_bits(rows: Any) -> bool:
    return four_bits.is_four_bits(rows.tensor_type)


def _matrix(rows: Sequence[_Rows], group: int) -> Node:
    if any(each.tensor_type in _PLAIN for each in rows):
        values = [dequantize(each.data, each.tensor_type).astype(np.float16) for each in rows]
        return ops.convert(ops.constant(np.concatenate(values)), "f32")
    grouped = [_grouped(each, group) for each in rows]
    numbers, scales = (np.concatenate(each) for each in zip(*grouped, strict=True))
    return _scaled(numbers, scales)


def _scaled(numbers: NDArray[np.int8], scales: NDArray[np.float16]) -> Node:
    """[..., outputs, groups, numbers] as floats of [..., outputs, inputs]."""
    scaled = ops.multiply(ops.convert(ops.constant(numbers), "f16"), ops.constant(scales))
    return ops.convert(ops.reshape(scaled, np.array([*numbers.shape[:-2], -1], np.int64), False), "f32")


def _grouped(rows: _Rows, group: int) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Rows of any quantization as int8, [rows, groups, numbers], and their scales, [rows, groups, 1]."""
    starts = range(0, len(rows.data), _ROWS)
    values = (dequantize(rows.data[start : start + _ROWS], rows.tensor_type) for start in starts)
    pieces = [as_int8(each.reshape(len(each), -1, group)) for each in values]
    return np.concatenate([piece[0] for piece in pieces]), np.concatenate([piece[1] for piece in pieces])


def half_apart(rows: int, heads: int) -> NDArray[np.intp]:
    """`half_apart(4, 1)` is `0, 2, 1, 3`: the pairs 0-1 and 2-3 come to lie half a head apart."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
