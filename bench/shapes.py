"""Models of a given shape with random weights, as GGUF files: `python -m bench.shapes 1.1B Q4_K_M FOLDER`.

How fast a model is depends on its shape and on the kind of its weights, not on what they say. So the blocks
of the file are random bytes, with scales in their places that keep the numbers as large as those of a real
model. The tokenizer is that of the default model.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGML_QUANT_VERSION,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
)
from msgspec import Struct
from numpy.typing import NDArray

from bench.errors import BenchError, told
from dragoman.engines.default_weights import default_model

Bytes: TypeAlias = NDArray[np.uint8]
Tensor: TypeAlias = tuple[str, tuple[int, ...], GGMLQuantizationType]
Field: TypeAlias = tuple[str, Any, list[GGUFValueType]]
"""Of the header of a file."""
_USED = 8
"""Experts for each one that is used."""
_SPREAD = 0.02
"""Standard deviation of the weights, about that of real ones."""
F32, Q4_0, Q4_1 = GGMLQuantizationType.F32, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1
Q4_K, Q6_K, Q8_0 = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.Q8_0


class Shape(Struct, frozen=True):
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    tied: bool = False
    """Whether one table is at the begin and at the end."""
    experts: int = 0
    """So many in each layer, of which each token uses an eighth; `inner` is of one."""

    @property
    def architecture(self) -> str:
        return "qwen3moe" if self.experts else "llama"

    @property
    def head(self) -> int:
        return self.width // self.heads


SHAPES: Mapping[str, Shape] = {
    "135M": Shape(30, 576, 1536, 9, 3, tied=True),
    "1.1B": Shape(22, 2048, 5632, 32, 4),
    "3B": Shape(28, 3072, 8192, 24, 8, tied=True),
    "0.7B-A0.1B": Shape(8, 1024, 768, 16, 4, tied=True, experts=32),
}
KINDS: Mapping[str, GGMLQuantizationType] = {
    "Q4_0": Q4_0,
    "Q4_1": Q4_1,
    "Q4_K_S": Q4_K,
    "Q4_K_M": Q4_K,
    "Q6_K": Q6_K,
    "Q8_0": Q8_0,
}
"""As files are called, and what most of their weights are in. Q4_K_M has Q6_K for half of those that it would
harm most, and what gives the logits is in Q6_K in all files of four bits."""


def make(folder: Path, name: str, kind: str, seed: int = 1) -> Path:
    """The path of the file, which is written if it is not there."""
    if SHAPES[name].width % GGML_QUANT_SIZES[KINDS[kind]][0]:
        raise BenchError(f"{name} is too narrow for {kind}, whose blocks are longer: take Q4_0 or Q8_0.")
    file = folder / f"random-{name}.{kind}.gguf"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    write(part, SHAPES[name], kind, read_vocabulary(default_model()), seed)
    part.rename(file)
    return file


def write(file: Path, shape: Shape, kind: str, vocabulary: Sequence[Field], seed: int = 1) -> None:
    random = np.random.default_rng(seed)
    writer = GGUFWriter(file, shape.architecture)
    for name, value, kinds in vocabulary:
        writer.add_key_value(name, value, kinds[0], kinds[1] if len(kinds) > 1 else None)
    _describe(writer, shape)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    size = next(len(value) for name, value, _ in vocabulary if name == "tokenizer.ggml.tokens")
    tensors = list(_tensors(shape, kind, size))
    for name, measures, quantization in tensors:
        numbers, room = GGML_QUANT_SIZES[quantization]
        count = math.prod(measures) // numbers * room
        writer.add_tensor_info(name, measures, np.dtype(np.float32), count, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, measures, quantization in tensors:
        writer.write_tensor_data(_blocks(quantization, measures, random))
    writer.close()


def _describe(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts // _USED)
        writer.add_expert_feed_forward_length(shape.inner)


def _tensors(shape: Shape, kind: str, vocabulary: int) -> Iterator[Tensor]:
    usual = KINDS[kind]
    # Rows that are not whole blocks of Q6_K are in Q8_0 in such files.
    logits = Q8_0 if usual == Q8_0 or shape.width % GGML_QUANT_SIZES[Q6_K][0] else Q6_K
    width = shape.width
    keys = shape.kv_heads * shape.head
    yield "token_embd.weight", (vocabulary, width), logits if shape.tied else usual
    yield "output_norm.weight", (width,), F32
    if not shape.tied:
        yield "output.weight", (vocabulary, width), logits
    for layer in range(shape.layers):
        finer = Q6_K if kind == "Q4_K_M" and _gets_more(layer, shape.layers) else usual
        for name, measures, quantization in (
            ("attn_norm", (width,), F32),
            ("attn_q", (width, width), usual),
            ("attn_k", (keys, width), usual),
            ("attn_v", (keys, width), finer),
            ("attn_output", (width, width), usual),
            ("ffn_norm", (width,), F32),
            *(_mixture if shape.experts else _gated)(shape, usual, finer),
        ):
            yield f"blk.{layer}.{name}.weight", measures, quantization


def _gated(shape: Shape, usual: GGMLQuantizationType, finer: GGMLQuantizationType) -> Iterator[Tensor]:
    yield "ffn_gate", (shape.inner, shape.width), usual
    yield "ffn_up", (shape.inner, shape.width), usual
    yield "ffn_down", (shape.width, shape.inner), finer


def _mixture(shape: Shape, usual: GGMLQuantizationType, finer: GGMLQuantizationType) -> Iterator[Tensor]:
    yield "attn_q_norm", (shape.head,), F32
    yield "attn_k_norm", (shape.head,), F32
    yield "ffn_gate_inp", (shape.experts, shape.width), F32
    for name, measures, quantization in _gated(shape, usual, finer):
        yield f"{name}_exps", (shape.experts, *measures), quantization


def _gets_more(layer: int, layers: int) -> bool:
    """The first and the last eighth, and every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _blocks(kind: GGMLQuantizationType, measures: Sequence[int], random: np.random.Generator) -> NDArray[Any]:
    """Random numbers around zero, in blocks of a kind; what is not quantized and has one row is a norm."""
    numbers = math.prod(measures)
    if kind == F32 and len(measures) == 1:
        return np.ones(numbers, np.float32)
    if kind == F32:
        return random.normal(0, _SPREAD, measures).astype(np.float32)
    many, room = GGML_QUANT_SIZES[kind]
    blocks: Bytes = random.integers(0, 256, (numbers // many, room), np.uint8)
    if kind == Q4_K:
        # Scales and offsets of eight groups, six bits each: made equal, so that each group is around zero.
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    if kind == Q6_K:
        _scale(blocks, -2, _SPREAD / (18.5 * 74))
    elif kind == Q8_0:
        _scale(blocks, 0, _SPREAD / 74)
    else:
        step = _SPREAD / (4.6 * 37) if kind == Q4_K else _SPREAD / 4.6
        _scale(blocks, 0, step)
        if kind == Q4_1:
            _scale(blocks, 2, -7.5 * step)
        if kind == Q4_K:
            _scale(blocks, 2, 7.5 * step)
    return blocks


def _scale(blocks: Bytes, index: int, value: float) -> None:
    """Write a number of 16 bits into every block, `place` bytes from its begin."""
    index %= blocks.shape[1]
    blocks[:, index : index + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)


def read_vocabulary(source: Path) -> list[Field]:
    """A tokenizer and a chat template, as the header of a file has them."""
    return [
        (field.name, field.contents(), field.types)
        for field in GGUFReader(source).fields.values()
        if field.name.startswith("tokenizer.")
    ]


def cli() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.shapes", description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(make(args.folder, args.shape, args.kind))


if __name__ == "__main__":
    sys.exit(told(cli))
