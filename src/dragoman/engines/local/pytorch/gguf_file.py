"""A GGUF file for this runner: its dimensions, and its tensors in the form of Hugging Face's files.

llama.cpp's files have other names, the experts of a layer are one tensor, Gemma's norms are stored as they
are and not as the difference from 1, and if a family rotates adjacent rows together, rows of queries and keys
are in that order. All of this is undone while they are read, so that weights can be changed, and adapters
added, by the names that they have in a folder.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_from_byte_shape, quant_shape_to_byte_shape
from numpy.typing import NDArray
from torch import Tensor

from dragoman.engines.local.gguf_model import read_header
from dragoman.engines.local.openvino.architectures import OpenVinoUnsupported, RopeConfig, shape_of
from dragoman.engines.local.pytorch.architectures import DecoderConfig, RotaryFrequencies
from dragoman.errors import ModelFileError

Bytes: TypeAlias = NDArray[np.uint8]
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3")
_FACTORS = "rope_freqs.weight"
"""Tensor with divisors of the rotary frequencies, if they are not scaled uniformly."""
_NAME = re.compile(r"(?:blk\.(\d{1,6})\.)?(\w+)\.(weight|bias)")
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_PIECE = 1 << 20
"""Bytes that are dequantized at a time: with more, intermediate results would not fit in caches."""


class GgufFile:
    """All parts of a split model, as one."""

    def __init__(self, parts: Sequence[Path], metadata: Mapping[str, str]) -> None:
        self._path = parts[0]
        self._metadata = metadata
        self._architecture = metadata.get("general.architecture", "unknown")
        if self._architecture not in ARCHITECTURES:
            raise self._wrong(
                f"its architecture {self._architecture} is not among {', '.join(ARCHITECTURES)}"
            )
        self._found = {each.name: (part, each) for part in parts for each in read_header(part)}

    @property
    def numbers(self) -> int:
        return sum(math.prod(tensor.shape) for _, tensor in self._found.values())

    def decoder(self) -> DecoderConfig:
        """Return the dimensions. Raises ModelFileError for unsupported models."""
        try:
            shape = shape_of(self._metadata)
        except OpenVinoUnsupported as why:
            raise self._wrong(str(why)) from None
        if shape.rotation.width != shape.head:
            raise self._wrong("it rotates a part of a head")
        local = shape.local_rotation
        return DecoderConfig(
            layers=shape.layers,
            width=self._integer("embedding_length"),
            inner=self._integer("feed_forward_length"),
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head=shape.head,
            vocabulary=len(self._read("token_embd.weight")[0]),
            context=self._integer("context_length"),
            epsilon=shape.epsilon,
            rotary=self._rotary(shape.rotation),
            local_rotary=RotaryFrequencies(tuple(local.speeds()), local.strength),
            attention_scale=shape.attention_scale,
            tied="output.weight" not in self._found,
            bias="blk.0.attn_q.bias" in self._found,
            output_bias="blk.0.attn_output.bias" in self._found,
            head_norms="blk.0.attn_q_norm.weight" in self._found,
            outer_norms=shape.family.windowed > 0,
            norm_from_one=shape.family.windowed > 0,
            gelu=shape.family.gelu,
            embedding_scale=shape.embedding_scale,
            windows=tuple(shape.window_of(layer) for layer in range(shape.layers)) if shape.window else (),
            experts=self._integer("expert_count") if shape.used_experts else 0,
            used_experts=shape.used_experts,
            expert_inner=self._integer("expert_feed_forward_length") if shape.used_experts else 0,
        )

    def tensors(self, shape: DecoderConfig, like: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors one after another, on the device and in the type of `like`. Quantized ones are
        dequantized there.
        """
        inner = _INNER | {
            "ffn_norm": f"{'pre_feedforward' if shape.outer_norms else 'post_attention'}_layernorm"
        }
        paired = {"attn_q": shape.heads, "attn_k": shape.kv_heads} if self._architecture == "llama" else {}
        for name in self._found:
            match = _NAME.fullmatch(name)
            if name == _FACTORS:
                continue
            if match is None or match[2] not in (_OUTER if match[1] is None else inner):
                raise self._wrong(f"it has an unknown tensor {name!r}")
            layer, part, kind = match.groups()
            data, quantized = self._read(name)
            # Vectors stay exact until 1 has been subtracted.
            values = _widen(data, quantized, like.device, torch.float32 if data.ndim == 1 else like.dtype)
            if shape.norm_from_one and part.endswith("_norm"):
                values = values - 1
            if part in paired:
                values = values.unflatten(0, (paired[part], -1, 2)).transpose(1, 2).reshape(values.shape)
            new = f"{_OUTER[part] if layer is None else f'model.layers.{layer}.{inner[part]}'}.{kind}"
            if "{}" in new:
                yield from ((new.format(number), expert) for number, expert in enumerate(values))
            else:
                yield new, values

    def _rotary(self, rotation: RopeConfig) -> RotaryFrequencies:
        speeds = np.array(rotation.speeds())
        if _FACTORS in self._found:
            speeds = speeds / dequantize(*self._read(_FACTORS))
        return RotaryFrequencies(tuple(speeds.tolist()), rotation.strength)

    def _integer(self, key: str) -> int:
        try:
            return int(self._metadata[f"{self._architecture}.{key}"])
        except (KeyError, ValueError):
            raise self._wrong(f"its {key} is missing or not an integer") from None

    def _read(self, name: str) -> tuple[Bytes, GGMLQuantizationType]:
        """Return the mapped bytes of a tensor in its rows, and their quantization."""
        if name not in self._found:
            raise ModelFileError(f"{self._path.name} lacks the tensor {name}.")
        part, tensor = self._found[name]
        try:
            kind = GGMLQuantizationType(tensor.kind)
            shape = quant_shape_to_byte_shape(tensor.shape[::-1], kind)
            return np.memmap(part, np.uint8, "r", tensor.start, shape), kind
        except ValueError:
            message = f"{part.name} is damaged, or has an unknown type in {name}."
            raise ModelFileError(message) from None

    def _wrong(self, why: str) -> ModelFileError:
        return ModelFileError(
            f"The runner torch cannot run {self._path.name}: {why}. Use the runner llamacpp."
        )


def _widen(data: Bytes, kind: GGMLQuantizationType, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Dequantize a tensor. Its bytes are copied to the device as they are, if it can dequantize them."""
    rows = data.reshape(-1, data.shape[-1])
    at_once = max(1, _PIECE // rows.shape[1])
    values = torch.empty(quant_shape_from_byte_shape(data.shape, kind), dtype=dtype, device=device)
    flat = values.view(len(rows), -1)
    for start in range(0, len(rows), at_once):
        piece = rows[start : start + at_once]
        if kind in _ON_DEVICE:
            # Copied, because mapped memory is read-only.
            result = _ON_DEVICE[kind](torch.from_numpy(np.array(piece)).to(device))
        else:
            result = torch.from_numpy(dequantize(piece, kind))
        flat[start : start + at_once] = result
    return values


def _q8_0(data: Tensor) -> Tensor:
    blocks = data.view(len(data), -1, 34)
    return (_scales(blocks) * blocks[..., 2:].view(torch.int8)).flatten(1)


def _q4_0(data: Tensor) -> Tensor:
    """Dequantize two numbers per byte, 0 to 15 for -8 to 7; the lower bits have a block's first half."""
    blocks = data.view(len(data), -1, 18)
    numbers = torch.cat([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], -1)
    return (_scales(blocks) * (numbers.float() - 8)).flatten(1)


def _scales(blocks: Tensor) -> Tensor:
    return blocks[..., :2].contiguous().view(torch.float16).float()


_ON_DEVICE: Mapping[GGMLQuantizationType, Callable[[Tensor], Tensor]] = {
    GGMLQuantizationType.F32: lambda data: data.view(torch.float32),
    GGMLQuantizationType.F16: lambda data: data.view(torch.float16),
    GGMLQuantizationType.BF16: lambda data: data.view(torch.bfloat16),
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
}
