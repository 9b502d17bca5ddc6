"""The architectures that the graph supports, and their dimensions. This module does not import OpenVINO.

They are all decoders with normalized inputs, rotary positions and gated layers. They differ in a few numbers,
given by the file or by its architecture; biases, norms behind layers and fused weights are recognized by
their tensors.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct


class ArchitectureDefaults(Struct, frozen=True):
    """Properties of an architecture that its files do not state."""

    paired: bool = False
    """Whether rows that are rotated together are adjacent in the file."""
    gelu: bool = False
    embedding_by_width: bool = False
    """Whether embeddings are multiplied by the square root of their width."""
    unrotated: int = 0
    """Every n-th layer has no positions; 0 for none."""
    windowed: int = 0
    """Every n-th layer attends to everything, the others to a window, with their own rotation; 0: all to
    everything.
    """
    mixes: bool = False
    """Whether it may have experts, selected by the largest shares, which are then normalized to 1."""


FAMILIES: Mapping[str, ArchitectureDefaults] = {
    "llama": ArchitectureDefaults(paired=True),
    "qwen2": ArchitectureDefaults(),
    "qwen3": ArchitectureDefaults(),
    "qwen3moe": ArchitectureDefaults(mixes=True),
    "granite": ArchitectureDefaults(paired=True),
    "smollm3": ArchitectureDefaults(paired=True, unrotated=4),
    "phi3": ArchitectureDefaults(),
    "gemma3": ArchitectureDefaults(gelu=True, embedding_by_width=True, windowed=6),
}
RECIPE = 8
"""Version of the conversion; raised when the same file is converted differently."""
_LARGE_GEMMA = 62
"""Layers of the Gemma model that scales attention by its width instead of its heads."""
_LOCAL_BASE = 10000.0
_MOST = 1 << 20
"""Maximum number of layers, heads and elements in them."""


class OpenVinoUnsupported(Exception):
    """The reason why OpenVINO does not run a model, in words that fit after "because"."""


class RopeConfig(Struct, frozen=True):
    """Rotary positions: the speeds, and how they were scaled for longer contexts."""

    base: float
    width: int
    """Elements of a head that are rotated; the rest is unchanged."""
    stretch: float = 1.0
    """Factor by which positions are scaled down."""
    kind: Literal["linear", "yarn"] = "linear"
    trained: int = 0
    """For yarn: the context length before scaling."""

    def speeds(self) -> list[float]:
        """Return the radians per position of each pair of elements."""
        fast = [self.base ** (-2 * pair / self.width) for pair in range(self.width // 2)]
        if self.kind == "linear":
            return [speed / self.stretch for speed in fast]
        # Pairs that turn often within the trained length are unchanged, slow ones are scaled.
        low, high = (self._turning(turns) for turns in (32.0, 1.0))
        low, high = max(0.0, math.floor(low)), min(self.width - 1.0, math.ceil(high))
        mixed = []
        for pair, speed in enumerate(fast):
            kept = 1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))
            mixed.append(speed / self.stretch * (1 - kept) + speed * kept)
        return mixed

    @property
    def strength(self) -> float:
        """Factor for cosines and sines."""
        return 1.0 + 0.1 * math.log(self.stretch) if self.kind == "yarn" else 1.0

    def _turning(self, turns: float) -> float:
        """Return the pair that makes this many turns within the trained length."""
        return self.width * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(self.base))


class ModelShape(Struct, frozen=True):
    layers: int
    heads: int
    kv_heads: int
    head: int
    """Elements of a head."""
    epsilon: float
    family: ArchitectureDefaults
    rotation: RopeConfig
    local_rotation: RopeConfig
    """Rotation of layers with a window."""
    window: int
    attention_scale: float
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    used_experts: int
    """Experts used per token, in layers that have experts."""

    def window_of(self, layer: int) -> int:
        """Return the attention window of a layer in tokens; 0 for no limit."""
        every = self.family.windowed
        return self.window if every and (layer + 1) % every else 0

    def rotation_of(self, layer: int) -> RopeConfig | None:
        every = self.family.unrotated
        if every and not (layer + 1) % every:
            return None
        return self.local_rotation if self.window_of(layer) else self.rotation


def shape_of(metadata: Mapping[str, Any]) -> ModelShape:
    """Read the dimensions from a file's metadata. Raises OpenVinoUnsupported for models that the graph does
    not support.
    """
    return _MetadataReader(metadata).shape()


class _MetadataReader:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._architecture = str(metadata.get("general.architecture", "unknown"))
        if self._number("attn_logit_softcapping"):
            raise OpenVinoUnsupported(
                "its attention has a soft cap, which OpenVINO's paged attention does not support"
            )
        if self._architecture not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise OpenVinoUnsupported(f"the architecture {self._architecture} is not among {known}")
        self._family = FAMILIES[self._architecture]

    def shape(self) -> ModelShape:
        if self._number("expert_count") and not self._family.mixes:
            raise OpenVinoUnsupported("its mixture of experts is not supported")
        if self._number("final_logit_softcapping"):
            raise OpenVinoUnsupported("its logits have a soft cap")
        width, heads = self._integer("embedding_length"), self._integer("attention.head_count")
        head = self._integer("attention.key_length", width // heads or None)
        if self._integer("attention.value_length", head) != head:
            raise OpenVinoUnsupported("its keys and values have different widths")
        layers = self._integer("block_count")
        kv_heads = self._integer("attention.head_count_kv", heads)
        if heads % kv_heads:
            raise OpenVinoUnsupported("its number of heads is not a multiple of its key heads")
        base = self._positive("rope.freq_base_swa", _LOCAL_BASE)
        return ModelShape(
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head=head,
            epsilon=self._number("attention.layer_norm_rms_epsilon", 1e-5),
            family=self._family,
            rotation=self._rotation(head),
            local_rotation=RopeConfig(base=base, width=head),
            window=self._count("attention.sliding_window") if self._family.windowed else 0,
            attention_scale=self._attention_scale(width, heads, head, layers),
            embedding_scale=width**0.5 if self._family.embedding_by_width else self._scale("embedding_scale"),
            residual_scale=self._scale("residual_scale"),
            logit_scale=1 / self._scale("logit_scale"),
            used_experts=self._count("expert_used_count"),
        )

    def _attention_scale(self, width: int, heads: int, head: int, layers: int) -> float:
        if self._architecture == "gemma3" and layers == _LARGE_GEMMA:
            return float((width / heads) ** -0.5)
        return self._number("attention.scale") or float(head**-0.5)

    def _rotation(self, head: int) -> RopeConfig:
        kind = str(self._metadata.get(f"{self._architecture}.rope.scaling.type") or "none")
        if kind not in ("none", "linear", "yarn"):
            raise OpenVinoUnsupported(f"positions are scaled ({kind})")
        yarn = kind == "yarn"
        if yarn and any("yarn_" in key or key.endswith("attn_factor") for key in self._metadata):
            raise OpenVinoUnsupported("positions are scaled (yarn with its own factors)")
        rotation = RopeConfig(
            base=self._positive("rope.freq_base", 10000.0),
            width=self._integer("rope.dimension_count", head),
            stretch=self._positive("rope.scaling.factor", 1.0) if kind != "none" else 1.0,
            kind="yarn" if yarn else "linear",
            trained=self._count("rope.scaling.original_context_length") or self._count("context_length"),
        )
        if rotation.width % 2 or rotation.width > head:
            raise OpenVinoUnsupported("its heads cannot be rotated in pairs")
        if yarn and (rotation.base <= 1 or not rotation.trained):
            raise OpenVinoUnsupported("positions are scaled (yarn without a valid length)")
        return rotation

    def _scale(self, key: str) -> float:
        """Return a scale; 0 in the file means none."""
        return self._number(key) or 1.0

    def _integer(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 1 and at most what a graph can have."""
        value = int(self._positive(key, default, least=1))
        if value > _MOST:
            raise OpenVinoUnsupported(f"its {key} cannot be {value}")
        return value

    def _count(self, key: str) -> int:
        return int(self._positive(key, 0, least=0))

    def _positive(self, key: str, default: float | None, least: float = 1e-30) -> float:
        value = self._number(key, default)
        if value < least:
            raise OpenVinoUnsupported(f"its {key} cannot be {value:g}")
        return value

    def _number(self, key: str, default: float | None = 0.0) -> float:
        """Return a number; a list is accepted if all layers have the same value."""
        result = self._metadata.get(f"{self._architecture}.{key}", default)
        if result is None:
            raise OpenVinoUnsupported(f"the file does not have its {key}")
        listed = result.strip("[]").split(",") if isinstance(result, str) else result
        try:
            values = {float(value) for value in (listed if isinstance(listed, list) else [listed])}
        except (TypeError, ValueError, OverflowError):
            values = {math.nan}
        if len(values) > 1:
            raise OpenVinoUnsupported(f"its {key} differs between layers")
        value = min(values, default=math.nan)
        if not math.isfinite(value):
            raise OpenVinoUnsupported(f"its {key} is not a number")
        return value
