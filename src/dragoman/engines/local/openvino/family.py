"""Which models the graph can be built for, and their measures. Nothing of OpenVINO is imported here."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
"""By name; and whether rows that are rotated together are neighbours in the file."""


class NotForOpenVino(Exception):
    """Why a model is not run by OpenVINO, in words that fit after "because"."""


class Shape(Struct, frozen=True):
    layers: int
    heads: int
    kv_heads: int
    head: int
    """Numbers in a head."""
    epsilon: float
    base: float
    """Of the rotation by position."""
    paired: bool


def shape_of(metadata: Mapping[str, Any]) -> Shape:
    """The measures in a file's metadata. Raises NotForOpenVino for what the graph does not know."""
    architecture = str(metadata.get("general.architecture", "unknown"))
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise NotForOpenVino(f"the architecture {architecture} is not among {known}")

    def value(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    if int(value("expert_count", 0)):
        raise NotForOpenVino("mixtures of experts are not among what it runs")
    if str(value("rope.scaling.type", "none")) not in ("none", ""):
        raise NotForOpenVino(f"positions are scaled ({value('rope.scaling.type')})")
    if int(value("attention.sliding_window", 0)):
        raise NotForOpenVino("attention goes over a sliding window")
    heads = int(value("attention.head_count"))
    head = int(value("attention.key_length", int(value("embedding_length")) // heads))
    if int(value("rope.dimension_count", head)) != head or int(value("attention.value_length", head)) != head:
        raise NotForOpenVino("its heads are rotated in part")
    return Shape(
        layers=int(value("block_count")),
        heads=heads,
        kv_heads=int(value("attention.head_count_kv", heads)),
        head=head,
        epsilon=float(value("attention.layer_norm_rms_epsilon", 1e-5)),
        base=float(value("rope.freq_base", 10000.0)),
        paired=ARCHITECTURES[architecture],
    )
