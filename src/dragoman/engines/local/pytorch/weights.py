"""The weights of a decoder as a few large matrices, and the view that each tensor of a file has in them.

Weights multiplied with the same states are one matrix. A tensor of a file is a part of it: a view, by its
name in the files. So loading means copying into views, and so does changing the weights of a running model.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dragoman.engines.local.pytorch.architectures import DecoderConfig
from dragoman.engines.local.pytorch.quantized import Matrix, QuantizedMatrix
from dragoman.errors import BadRequest, ModelFileError


class LayerWeights:
    """One layer's tensors; those that a model does not have are None."""

    __slots__ = (
        "attention_norm",
        "bias",
        "down",
        "experts_down",
        "experts_up",
        "inner_norm",
        "key_norm",
        "outer_attention_norm",
        "outer_inner_norm",
        "output",
        "output_bias",
        "projection",
        "query_norm",
        "router",
        "up",
    )

    def __init__(self, shape: DecoderConfig, make: "_TensorFactory") -> None:
        queries, kept = shape.heads * shape.head, shape.kv_heads * shape.head
        self.attention_norm = make(shape.width)
        self.inner_norm = make(shape.width)
        self.projection = make.matrix(queries + 2 * kept, shape.width)
        self.bias = make(queries + 2 * kept) if shape.bias else None
        self.output = make.matrix(shape.width, queries)
        self.output_bias = make(shape.width) if shape.output_bias else None
        self.query_norm = make(shape.head) if shape.head_norms else None
        self.key_norm = make(shape.head) if shape.head_norms else None
        self.outer_attention_norm = make(shape.width) if shape.outer_norms else None
        self.outer_inner_norm = make(shape.width) if shape.outer_norms else None
        dense = not shape.experts
        self.up = make.matrix(2 * shape.inner, shape.width) if dense else None
        self.down = make.matrix(shape.width, shape.inner) if dense else None
        self.router = None if dense else make(shape.experts, shape.width)
        self.experts_up = None if dense else make.matrix(shape.experts, 2 * shape.expert_inner, shape.width)
        self.experts_down = None if dense else make.matrix(shape.experts, shape.width, shape.expert_inner)

    def places(self, shape: DecoderConfig) -> Iterator[tuple[str, Matrix]]:
        """Yield the names in files, and the views that they represent."""
        queries, kept = shape.heads * shape.head, shape.kv_heads * shape.head
        before = "post_attention_layernorm" if not shape.outer_norms else "pre_feedforward_layernorm"
        yield "input_layernorm.weight", self.attention_norm
        yield f"{before}.weight", self.inner_norm
        for kind, whole in (("weight", self.projection), ("bias", self.bias)):
            if whole is not None:
                for name, part in zip("qkv", whole.split([queries, kept, kept]), strict=True):
                    yield f"self_attn.{name}_proj.{kind}", part
        yield "self_attn.o_proj.weight", self.output
        if self.output_bias is not None:
            yield "self_attn.o_proj.bias", self.output_bias
        if self.query_norm is not None and self.key_norm is not None:
            yield "self_attn.q_norm.weight", self.query_norm
            yield "self_attn.k_norm.weight", self.key_norm
        if self.outer_attention_norm is not None and self.outer_inner_norm is not None:
            yield "post_attention_layernorm.weight", self.outer_attention_norm
            yield "post_feedforward_layernorm.weight", self.outer_inner_norm
        if self.up is not None and self.down is not None:
            yield "mlp.gate_proj.weight", self.up[: shape.inner]
            yield "mlp.up_proj.weight", self.up[shape.inner :]
            yield "mlp.down_proj.weight", self.down
        if self.router is not None and self.experts_up is not None and self.experts_down is not None:
            yield "mlp.gate.weight", self.router
            for number in range(shape.experts):
                up = self.experts_up[number]
                yield f"mlp.experts.{number}.gate_proj.weight", up[: shape.expert_inner]
                yield f"mlp.experts.{number}.up_proj.weight", up[shape.expert_inner :]
                yield f"mlp.experts.{number}.down_proj.weight", self.experts_down[number]


class ModelWeights:
    """All weights of a model. `quantized` is the type of the layers' matrices, if it is not `dtype`."""

    def __init__(
        self,
        shape: DecoderConfig,
        device: torch.device,
        dtype: torch.dtype,
        quantized: torch.dtype | None = None,
    ) -> None:
        make = _TensorFactory(device, dtype, quantized)
        self.shape = shape
        self.embedding = make(shape.vocabulary, shape.width)
        self.head = self.embedding if shape.tied else make(shape.vocabulary, shape.width)
        self.norm = make(shape.width)
        self.layers = [LayerWeights(shape, make) for _ in range(shape.layers)]
        self._places: dict[str, Matrix] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm,
        }
        if not shape.tied:
            self._places["lm_head.weight"] = self.head
        for number, layer in enumerate(self.layers):
            for name, view in layer.places(shape):
                self._places[f"model.layers.{number}.{name}"] = view

    def find_matrix(self, name: str, shape: Sequence[int]) -> Matrix | None:
        """Return the view for a tensor of this name; None if it is not needed. Raises BadRequest for one
        that the model does not have, or with another shape.
        """
        name = _AROUND.sub(r"\1\2", name)
        position = self._places.get(name)
        if position is None:
            position = self._joined(name)
        if position is None:
            if _LEFT_OUT.match(name) or (self.shape.tied and name == "lm_head.weight"):
                return None
            raise BadRequest(f"The model has no tensor {name!r}.", param=None)
        if [*position.shape] != [*shape]:
            raise BadRequest(
                f"The tensor {name!r} has the shape {[*shape]} instead of {[*position.shape]}.", param=None
            )
        return position

    def _joined(self, name: str) -> Matrix | None:
        """Return the experts of a layer as one tensor, which is their form in training."""
        match = _EXPERTS.fullmatch(name)
        layer = self.layers[int(match[1])] if match and int(match[1]) < len(self.layers) else None
        if match is None or layer is None:
            return None
        return layer.experts_down if match[2] == "down_proj" else layer.experts_up

    @torch.no_grad()
    def update(self, named: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy tensors into their views one after another; return their names.

        Raises BadRequest at the first that does not fit.
        """
        done = set()
        for name, tensor in named:
            position = self.find_matrix(name, tensor.shape)
            if position is not None:
                position.copy_(tensor)
                done.add(_AROUND.sub(r"\1\2", name))
        return done

    def load(self, named: Iterable[tuple[str, Tensor]], path: Path) -> None:
        """Load all weights from a file or folder."""
        try:
            missing = self._places.keys() - self.update(named)
        except BadRequest as error:
            raise ModelFileError(f"{path} does not match its config. {error}") from None
        if missing:
            raise ModelFileError(f"{path} lacks {len(missing)} tensors, such as {min(missing)}.")


# Tensors in files that are not weights of the decoder.
_LEFT_OUT = re.compile(r".*rotary_emb\.inv_freq$|(model\.)?(vision_tower|multi_modal_projector)\.")
_AROUND = re.compile(r"^(?:language_model\.(model\.|lm_head\.)|(model\.)language_model\.)")
"""Prefixes of names in multimodal models."""
_READ = frozenset({"BF16", "F16", "F32", "F64"})
_SCALED = frozenset({"F8_E4M3", "F8_E5M2", "I8"})
_SCALE = re.compile(r"\.weight_scale(_inv)?$|\.(input|k|q|v|output)_scale$")
_EXPERTS = re.compile(r"model\.layers\.(\d{1,6})\.mlp\.experts\.(gate_up_proj|down_proj)")


class _TensorFactory:
    def __init__(self, device: torch.device, dtype: torch.dtype, quantized: torch.dtype | None) -> None:
        self._device = device
        self._dtype = dtype
        self._quantized = quantized

    def __call__(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self._device, dtype=self._dtype)

    def matrix(self, *shape: int) -> Matrix:
        if self._quantized is None:
            return self(*shape)
        scales = torch.empty((*shape[:-1], 1), device=self._device, dtype=torch.float32)
        return QuantizedMatrix(torch.empty(shape, device=self._device, dtype=self._quantized), scales)


class TensorFiles:
    """The tensors of all files of a folder. They are mapped, so the files are never in memory as a whole.

    An 8-bit tensor comes with scales, one for all, for each row or for each block, and is dequantized. Scales
    for activations are ignored.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._where: dict[str, Path] = {}
        self._last: tuple[Path, Any] | None = None
        files = files_of(path)
        if not files:
            raise ModelFileError(f"There are no safetensors in {path}.")
        for file in files:
            self._where |= dict.fromkeys(self._open(file).keys(), file)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._where if not _SCALE.search(name))

    def shape(self, name: str) -> list[int]:
        """Return a tensor's shape. Raises ModelFileError if its type cannot be read."""
        result = self._open(self._where[name]).get_slice(name)
        kind, shape = result.get_dtype(), result.get_shape()
        if kind not in _READ and not (kind in _SCALED and self._scale(name)):
            more = " without the scales that this type needs" if kind in _SCALED else ""
            raise ModelFileError(f"{self._path} has {name} in {kind}{more}.")
        return [*shape]

    def read(self, name: str) -> Tensor:
        self.shape(name)
        tensor = self._open(self._where[name]).get_tensor(name)
        if tensor.element_size() > 1:
            return tensor
        scale = self._scale(name)
        return tensor.float() * _spread(self._open(self._where[scale]).get_tensor(scale), tensor.shape)

    def _open(self, file: Path) -> Any:
        """Open one file at a time: the others need not stay mapped."""
        if self._last is None or self._last[0] != file:
            try:
                self._last = file, safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelFileError(f"{file} cannot be read ({type(error).__name__}).") from None
        return self._last[1]

    def _scale(self, name: str) -> str:
        return next((name + end for end in ("_scale_inv", "_scale") if name + end in self._where), "")


def _spread(scales: Tensor, shape: Sequence[int]) -> Tensor:
    """Expand scales of blocks, whose sides are powers of two, to one for each number."""
    scales = scales.float().reshape(-1, 1) if scales.ndim < 2 else scales.float()
    for axis, (size, count) in enumerate(zip(shape, scales.shape, strict=True)):
        if count > 1:
            side = 1 << (-(-size // count) - 1).bit_length()
            scales = scales.repeat_interleave(side, axis).narrow(axis, 0, size)
    return scales


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors one after another."""
    files = TensorFiles(path)
    return ((name, files.read(name)) for name in files)


def files_of(folder: Path) -> list[Path]:
    """Return the files that the index names, else all in the folder; or the file itself."""
    if folder.is_file():
        return [folder]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        result = msgspec.json.decode(index.read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError):
        raise ModelFileError(f"{index} cannot be read.") from None
    names = sorted({*result.weight_map.values()})
    if any(Path(name).name != name for name in names):
        raise ModelFileError(f"{index} names files outside of its folder.")
    return [folder / name for name in names]


class _Index(msgspec.Struct):
    weight_map: Mapping[str, str]
