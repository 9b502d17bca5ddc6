"""The weights of a decoder, as few large matrices, and where each tensor of a file is in them.

What is multiplied by the same states is one matrix. A tensor of a file is a part of it: a view, by the name
that files give it. So loading is copying into views, and so is changing the weights of a model that runs.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dragoman.engines.local.pytorch.family import Decoder
from dragoman.engines.local.pytorch.quantized import Matrix, Quantized
from dragoman.errors import BadRequest, ModelFileError


class Layer:
    """One layer's tensors. Those that a model has not are None."""

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

    def __init__(self, shape: Decoder, make: "_Make") -> None:
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

    def places(self, shape: Decoder) -> Iterator[tuple[str, Matrix]]:
        """The names of files, and the views that they stand for."""
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


class Weights:
    """`quantized` is what the matrices of layers are kept in, if not in `dtype` as all else."""

    def __init__(
        self, shape: Decoder, device: torch.device, dtype: torch.dtype, quantized: torch.dtype | None = None
    ) -> None:
        make = _Make(device, dtype, quantized)
        self.shape = shape
        self.embedding = make(shape.vocabulary, shape.width)
        self.head = self.embedding if shape.tied else make(shape.vocabulary, shape.width)
        self.norm = make(shape.width)
        self.layers = [Layer(shape, make) for _ in range(shape.layers)]
        self._places: dict[str, Matrix] = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm,
        }
        if not shape.tied:
            self._places["lm_head.weight"] = self.head
        for number, layer in enumerate(self.layers):
            for name, view in layer.places(shape):
                self._places[f"model.layers.{number}.{name}"] = view

    def place(self, name: str, shape: Sequence[int]) -> Matrix | None:
        """Where a tensor of this name belongs; None where it is another one's copy. Raises BadRequest for one
        that the model has not."""
        name = _AROUND.sub(r"\1\2", name)
        place = self._places.get(name)
        if place is None:
            place = self._joined(name)
        if place is None:
            if _LEFT_OUT.match(name) or (self.shape.tied and name == "lm_head.weight"):
                return None
            raise BadRequest(f"The model has no tensor {name!r}.", param=None)
        if [*place.shape] != [*shape]:
            raise BadRequest(
                f"The tensor {name!r} has the shape {[*shape]} instead of {[*place.shape]}.", param=None
            )
        return place

    def _joined(self, name: str) -> Matrix | None:
        """The experts of a layer as one tensor, which is how models have them that are trained."""
        found = _EXPERTS.fullmatch(name)
        layer = self.layers[int(found[1])] if found and int(found[1]) < len(self.layers) else None
        if found is None or layer is None:
            return None
        return layer.experts_down if found[2] == "down_proj" else layer.experts_up

    @torch.no_grad()
    def update(self, named: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy tensors to their places, one after the other; their names. Raises BadRequest at the first that
        has none."""
        done = set()
        for name, tensor in named:
            place = self.place(name, tensor.shape)
            if place is not None:
                place.copy_(tensor)
                done.add(_AROUND.sub(r"\1\2", name))
        return done

    def load(self, named: Iterable[tuple[str, Tensor]], path: Path) -> None:
        """All of them, out of a file or folder."""
        try:
            missing = self._places.keys() - self.update(named)
        except BadRequest as error:
            raise ModelFileError(f"{path} is not what it says it is. {error}") from None
        if missing:
            raise ModelFileError(f"{path} lacks {len(missing)} tensors, {min(missing)} among them.")


# Files have these beside the weights, or as what they are made of.
_LEFT_OUT = re.compile(r".*rotary_emb\.inv_freq$|(model\.)?(vision_tower|multi_modal_projector)\.")
_AROUND = re.compile(r"^(?:language_model\.(model\.|lm_head\.)|(model\.)language_model\.)")
"""How names begin in models that see."""
_READ = frozenset({"BF16", "F16", "F32", "F64"})
_SCALED = frozenset({"F8_E4M3", "F8_E5M2", "I8"})
_SCALE = re.compile(r"\.weight_scale(_inv)?$|\.(input|k|q|v|output)_scale$")
_EXPERTS = re.compile(r"model\.layers\.(\d{1,6})\.mlp\.experts\.(gate_up_proj|down_proj)")


class _Make:
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
        return Quantized(torch.empty(shape, device=self._device, dtype=self._quantized), scales)


class TensorFiles:
    """The tensors of all files of a folder. They are mapped, so none is in memory as a whole.

    One of eight bits has scales beside it, one for all, for each row or for each block, and is read as what
    it stands for. Scales of what it is multiplied with are of no use here.
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
        """Raises ModelFileError for one that is not made of numbers that can be read."""
        found = self._open(self._where[name]).get_slice(name)
        kind, shape = found.get_dtype(), found.get_shape()
        if kind not in _READ and not (kind in _SCALED and self._scale(name)):
            more = ", which takes scales that are not there" if kind in _SCALED else ""
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
        """One at a time: what was read of another need not stay mapped."""
        if self._last is None or self._last[0] != file:
            try:
                self._last = file, safe_open(str(file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelFileError(f"{file} cannot be read ({type(error).__name__}).") from None
        return self._last[1]

    def _scale(self, name: str) -> str:
        return next((name + end for end in ("_scale_inv", "_scale") if name + end in self._where), "")


def _spread(scales: Tensor, shape: Sequence[int]) -> Tensor:
    """Scales of blocks, whose sides are powers of two, as one for each number."""
    scales = scales.float().reshape(-1, 1) if scales.ndim < 2 else scales.float()
    for axis, (size, count) in enumerate(zip(shape, scales.shape, strict=True)):
        if count > 1:
            side = 1 << (-(-size // count) - 1).bit_length()
            scales = scales.repeat_interleave(side, axis).narrow(axis, 0, size)
    return scales


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """One after the other."""
    files = TensorFiles(path)
    return ((name, files.read(name)) for name in files)


def files_of(folder: Path) -> list[Path]:
    """The files that the index names, or all; of one file, that."""
    if folder.is_file():
        return [folder]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        found = msgspec.json.decode(index.read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError):
        raise ModelFileError(f"{index} cannot be read.") from None
    names = sorted({*found.weight_map.values()})
    if any(Path(name).name != name for name in names):
        raise ModelFileError(f"{index} names files outside of its folder.")
    return [folder / name for name in names]


class _Index(msgspec.Struct):
    weight_map: Mapping[str, str]
