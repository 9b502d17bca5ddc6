"""LoRA adapters, added to the products that they change: `W x` becomes `W x + B (s * (A x))`.

`s` is the scale of an adapter for a row, and 0 for rows without it: so all rows are computed together. Each
adapter is a product of its own, so its result does not depend on the others. A step in which no row has an
adapter is computed without all of this.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from dragoman.engines.local.pytorch.architectures import DecoderConfig
from dragoman.engines.local.pytorch.weights import ModelWeights, read_tensors
from dragoman.errors import BadRequest, ModelFileError

_NAME = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(\d{1,6})\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight"
)
"""Tensor names as PEFT writes them. The prefix differs if the trained model was part of another."""
_PRODUCTS = {
    "projection": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
Multiply: TypeAlias = Callable[..., Tensor]


class LoraPair(Struct, frozen=True):
    """The two LoRA matrices of one product."""

    a: Tensor
    b: Tensor


class TorchAdapter(Struct, frozen=True):
    name: str
    terms: Mapping[tuple[int, str], LoraPair]
    """Terms by layer and product."""


class AdapterSet:
    """The loaded adapters, in the order of a row's scales."""

    def __init__(self) -> None:
        self.all: list[TorchAdapter] = []

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.all)

    def shares(
        self, adapters: Mapping[int, Sequence[tuple[str, float]]], slots: Sequence[int]
    ) -> list[list[float]]:
        """Return the scales of all adapters for each row."""
        by_slot = {
            slot: [dict(chosen).get(name, 0.0) for name in self.names] for slot, chosen in adapters.items()
        }
        none = [0.0] * len(self.all)
        return [by_slot.get(slot, none) for slot in slots]

    def add(
        self, result: Tensor, states: Tensor, shares: Tensor, layer: int, product: str, multiply: Multiply
    ) -> Tensor:
        for number, adapter in enumerate(self.all):
            if (term := adapter.terms.get((layer, product))) is not None:
                result = result + multiply(multiply(states, term.a) * shares[:, number, None], term.b)
        return result


def read_adapter(name: str, path: Path, weights: ModelWeights) -> TorchAdapter:
    """Read a folder as PEFT saves it. Raises ModelFileError or BadRequest if it does not fit the model."""
    config = _read_config(name, path)
    pairs: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, tensor in read_tensors(path / "adapter_model.safetensors"):
        match = _NAME.fullmatch(key)
        if match is None or int(match[1]) >= weights.shape.layers or not _known(match[2], weights.shape):
            raise BadRequest(
                f"The adapter {name!r} changes {key!r}, which is not supported.", code="unsupported_model"
            )
        pairs.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    if not pairs:
        raise ModelFileError(f"There is no adapter in {path}.")
    terms = {}
    for layer in range(weights.shape.layers):
        for product, parts in _PRODUCTS.items():
            mine = {part: pairs[layer, part] for part in parts if (layer, part) in pairs}
            if mine:
                terms[layer, product] = _term(name, mine, product, config, weights)
    return TorchAdapter(name, terms)


class _PeftConfig(Struct):
    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, Any] = msgspec.field(default_factory=dict)
    alpha_pattern: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def scale(self) -> float:
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def _read_config(name: str, path: Path) -> _PeftConfig:
    try:
        config = msgspec.json.decode((path / "adapter_config.json").read_bytes(), type=_PeftConfig)
    except (OSError, msgspec.MsgspecError):
        message = f"{path} is not a folder with PEFT's adapter_config.json; the runner torch needs one."
        raise ModelFileError(message) from None
    strange = config.use_dora or config.bias != "none" or config.modules_to_save
    if config.peft_type != "LORA" or config.r < 1 or strange or config.rank_pattern or config.alpha_pattern:
        message = f"The adapter {name!r} is not plain LoRA of one rank; merge it into the model instead."
        raise BadRequest(message, code="unsupported_model")
    return config


def _known(part: str, shape: DecoderConfig) -> bool:
    parts = [*_PRODUCTS["projection"], *_PRODUCTS["output"]]
    return part in parts or (not shape.experts and part in (*_PRODUCTS["up"], *_PRODUCTS["down"]))


def _term(
    name: str,
    pairs: Mapping[str, Mapping[str, Tensor]],
    product: str,
    config: _PeftConfig,
    weights: ModelWeights,
) -> LoraPair:
    """Create the term for a fused matrix of the model: the A of its parts are stacked, and each B is in
    the rows of its part.
    """
    outputs, inputs = getattr(weights.layers[0], product).shape
    sizes = _sizes(product, weights.shape)
    rows = {part: sum(sizes[:number]) for number, part in enumerate(_PRODUCTS[product])}
    rank, size = config.r, dict(zip(_PRODUCTS[product], sizes, strict=True))
    a = weights.embedding.new_zeros(rank * len(pairs), inputs)
    b = weights.embedding.new_zeros(outputs, rank * len(pairs))
    for number, (part, fields) in enumerate(pairs.items()):
        shapes = {kind: [*tensor.shape] for kind, tensor in fields.items()}
        if shapes != {"A": [rank, inputs], "B": [size[part], rank]}:
            raise BadRequest(
                f"The adapter {name!r} has a different shape than the model's {part}.",
                code="unsupported_model",
            )
        column = slice(number * rank, (number + 1) * rank)
        a[column] = fields["A"].to(a)
        b[rows[part] : rows[part] + size[part], column] = (fields["B"].float() * config.scale).to(b)
    return LoraPair(a, b)


def _sizes(product: str, shape: DecoderConfig) -> list[int]:
    """Return the rows of each part of a fused matrix."""
    if product == "projection":
        return [shape.heads * shape.head, *[shape.kv_heads * shape.head] * 2]
    return [shape.inner] * 2 if product == "up" else [shape.width]


def shares_tensor(shares: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    return torch.tensor(shares, dtype=like.dtype).to(like.device)
