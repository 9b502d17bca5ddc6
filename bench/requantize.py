"""A GGUF file with its weights in another precision: `python -m bench.requantize Q5_K FOLDER`.

For `python -m bench.runners`: what a runner makes of each precision shows on weights that mean something, and
few of those are at hand. Matrices of the layers are rounded to the nearest, block by block, without the
searching that makes files of llama.cpp's own a little better; that is the same for both runners. What comes
before and after the layers is in Q8_0, and so are rows that are not whole blocks.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFValueType, GGUFWriter
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from bench.errors import told
from dragoman.engines.default_weights import default_model

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]
_LONG = 256
"""Numbers in a block of a K kind."""
_LOW, _HALF = np.uint8(15), np.uint8(4)


def make(folder: Path, source: Path, kind: str) -> Path:
    """The path of the file, which is written if it is not there."""
    file = folder / f"{source.stem}-{kind}.gguf"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        _write(part, GGUFReader(source), Kind[kind])
        part.rename(file)
    return file


def _write(file: Path, source: GGUFReader, kind: Kind) -> None:
    fields = {field.name: field for field in source.fields.values() if not field.name.startswith("GGUF.")}
    writer = GGUFWriter(file, str(fields.pop("general.architecture").contents()), use_temp_file=True)
    for name, field in fields.items():
        inner = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in source.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, values)
            continue
        used = kind if tensor.name.startswith("blk.") else Kind.Q8_0
        if values.shape[-1] % GGML_QUANT_SIZES[used][0]:
            used = Kind.Q8_0
        writer.add_tensor(tensor.name, quantize_rows(values, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize_rows(values: Floats, kind: Kind) -> NDArray[Any]:
    if kind not in _LONG_KINDS:
        return np.asarray(quantize(values, kind))
    # Some rows at a time: what is computed takes many times their memory.
    items = [_LONG_KINDS[kind](rows.reshape(-1, _LONG)) for rows in np.array_split(values, 16) if rows.size]
    return np.concatenate(items).reshape(len(values), -1)


def _q4_k(blocks: Floats) -> Bytes:
    head, numbers = _offset_groups(blocks, 15)
    return np.concatenate([head, _nibbles(numbers)], axis=1)


def _q5_k(blocks: Floats) -> Bytes:
    head, numbers = _offset_groups(blocks, 31)
    bits = np.arange(8, dtype=np.uint8)[:, None]
    high = ((numbers >> 4) << bits).sum(axis=1, dtype=np.uint8)
    return np.concatenate([head, high, _nibbles(numbers & _LOW)], axis=1)


def _offset_groups(blocks: Floats, most: int) -> tuple[Bytes, Bytes]:
    """`scale * q - offset` in eight groups of 32; scales and offsets are six bits times one of the block."""
    groups = blocks.reshape(-1, 8, 32)
    offsets = np.maximum(-groups.min(axis=2), 0)
    scales = (groups.max(axis=2) + offsets) / most
    scale, scale6 = _sixths(scales)
    offset, offset6 = _sixths(offsets)
    real = (scale.astype(np.float32) * scale6)[..., None]
    shifted = groups + (offset.astype(np.float32) * offset6)[..., None]
    numbers = np.rint(shifted / np.where(real == 0, np.inf, real)).clip(0, most).astype(np.uint8)
    packed = np.concatenate(
        [
            scale6[:, :4] | scale6[:, 4:] >> 4 << 6,
            offset6[:, :4] | offset6[:, 4:] >> 4 << 6,
            scale6[:, 4:] & 15 | (offset6[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    return np.concatenate([scale.view(np.uint8), offset.view(np.uint8), packed], axis=1), numbers


def _sixths(values: Floats) -> tuple[NDArray[np.float16], Bytes]:
    unit = (values.max(axis=1, keepdims=True) / 63).astype(np.float16)
    divisor = np.where(unit == 0, np.inf, unit.astype(np.float32))
    return unit, np.rint(values / divisor).clip(0, 63).astype(np.uint8)


def _nibbles(numbers: Bytes) -> Bytes:
    """Two groups share 32 bytes: the first has the lower halves."""
    packed: Bytes = numbers[:, ::2] | numbers[:, 1::2] << _HALF
    return packed.reshape(len(numbers), -1)


def _q6_k(blocks: Floats) -> Bytes:
    """`scale * q` in sixteen groups of 16, with a scale of eight bits times one of the block."""
    groups = blocks.reshape(-1, 16, 16)
    scales = np.abs(groups).max(axis=2) / 31
    unit = (scales.max(axis=1, keepdims=True) / 127).astype(np.float16)
    divisor = np.where(unit == 0, np.inf, unit.astype(np.float32))
    scale8 = np.rint(scales / divisor).clip(0, 127).astype(np.int8)
    real = (unit.astype(np.float32) * scale8)[..., None]
    numbers = np.rint(groups / np.where(real == 0, np.inf, real)).clip(-32, 31) + 32
    # Each half has four runs of 32: the lower four bits of two lie in a byte, the upper two of all four.
    runs = numbers.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = runs[:, :, :2] & 15 | (runs[:, :, 2:] & 15) << 4
    high = (runs >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(axis=2, dtype=np.uint8)
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), scale8.view(np.uint8), unit.view(np.uint8)]
    return np.concatenate(parts, axis=1)


_LONG_KINDS: Mapping[Kind, Callable[[Floats], Bytes]] = {
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
KINDS = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.requantize", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="a GGUF file [default: the default weights]"
    )
    args = parser.parse_args()
    print(make(args.folder, args.model or default_model(), args.kind))


if __name__ == "__main__":
    sys.exit(told(cli))
