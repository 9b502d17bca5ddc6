"""The architectures that the runner supports, and their dimensions. This module does not import PyTorch.

All are decoders with normalized inputs, rotary positions and gated layers; `DecoderConfig` has their
differences. Each family has a function that reads it from a `config.json`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from msgspec import Struct

from dragoman.errors import ModelFileError

Config: TypeAlias = Mapping[str, Any]


class RotaryFrequencies(Struct, frozen=True):
    """Rotary frequencies: the radians by which each pair of elements turns per position."""

    speeds: tuple[float, ...]
    strength: float = 1.0
    """Factor for cosines and sines."""


class DecoderConfig(Struct, frozen=True, kw_only=True):
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    context: int
    epsilon: float
    rotary: RotaryFrequencies
    attention_scale: float
    tied: bool
    """Whether the output head uses the weights of the embedding."""
    bias: bool = False
    """Whether queries, keys and values have a bias."""
    output_bias: bool = False
    """Whether the output of attention has a bias."""
    head_norms: bool = False
    """Whether queries and keys are normalized before rotation."""
    outer_norms: bool = False
    """Whether the output of attention and of the feed-forward part is normalized, too."""
    norm_from_one: bool = False
    """Whether the weights of norms are stored as the difference from 1."""
    gelu: bool = False
    embedding_scale: float = 1.0
    windows: tuple[int, ...] = ()
    """Attention window of each layer in tokens, 0 for none; empty if no layer has one."""
    local_rotary: RotaryFrequencies | None = None
    """Frequencies of layers with a window, if they differ."""
    experts: int = 0
    used_experts: int = 0
    shares_add_to_one: bool = True
    expert_inner: int = 0

    def window_of(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def rotary_of(self, layer: int) -> RotaryFrequencies:
        local = self.local_rotary if self.window_of(layer) else None
        return self.rotary if local is None else local


def decoder_of(config: Config) -> DecoderConfig:
    """Read the configuration; of a multimodal model, the text part. Raises ModelFileError for unsupported
    models.
    """
    quantized = config.get("quantization_config") or {}
    if config.get("model_type") in _AROUND and isinstance(config.get("text_config"), Mapping):
        config = config["text_config"]
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ModelFileError(
            f"The runner torch does not support {kind} models, only {', '.join(FAMILIES)};"
            " use --engine transformers."
        )
    _check_quantized(quantized)
    return FAMILIES[kind](config)


def _check_quantized(config: Config) -> None:
    """Check the quantization: 8-bit weights with scales are supported, other methods are not."""
    method = str(config.get("quant_method", "fp8" if not config else "unknown"))
    groups = config.get("config_groups") or {}
    kinds = [group.get("weights") or {} for group in groups.values()]
    plain = all(kind.get("num_bits") == 8 and kind.get("symmetric", True) for kind in kinds)
    if method in ("fp8", "fbgemm_fp8") or (method == "compressed-tensors" and kinds and plain):
        return
    raise ModelFileError(
        f"The runner torch does not support weights quantized with {method} in this form, only fp8 and int8"
        " with scales (fp8, fbgemm_fp8, compressed-tensors); use --engine vllm."
    )


def _llama(config: Config, **more: Any) -> DecoderConfig:
    width, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    wanted = {"mlp_bias": False, "hidden_act": "silu", "use_sliding_window": False}
    if more.get("gelu"):
        wanted = {"hidden_activation": "gelu_pytorch_tanh"}
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise ModelFileError(f"The runner torch does not support {key} {config[key]!r} for this model.")
    head = int(config.get("head_dim") or width // heads)
    known: dict[str, Any] = {
        "layers": _integer(config, "num_hidden_layers"),
        "width": width,
        "inner": _integer(config, "intermediate_size"),
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head": head,
        "vocabulary": _integer(config, "vocab_size"),
        "context": int(config.get("max_position_embeddings") or 2048),
        "epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "rotary": _rotary(config, head),
        "attention_scale": head**-0.5,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "bias": bool(config.get("attention_bias", False)),
        "output_bias": bool(config.get("attention_bias", False)),
    }
    return DecoderConfig(**known | more)


def _mistral(config: Config) -> DecoderConfig:
    window = int(config.get("sliding_window") or 0)
    windows = (window,) * _integer(config, "num_hidden_layers") if window else ()
    return _llama(config, windows=windows)


def _qwen2(config: Config) -> DecoderConfig:
    return _llama(config, bias=True, output_bias=False)


def _qwen3(config: Config, **more: Any) -> DecoderConfig:
    return _llama(config, head_norms=True, **more)


def _qwen3_moe(config: Config) -> DecoderConfig:
    if config.get("mlp_only_layers") or int(config.get("decoder_sparse_step", 1)) != 1:
        raise ModelFileError("The runner torch does not support mixtures in which some layers are dense.")
    return _qwen3(
        config,
        experts=_integer(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        used_experts=_integer(config, "num_experts_per_tok"),
        shares_add_to_one=bool(config.get("norm_topk_prob", False)),
        expert_inner=_integer(config, "moe_intermediate_size"),
    )


def _gemma3(config: Config) -> DecoderConfig:
    config = {**_GEMMA3, **config}
    layers, head = _integer(config, "num_hidden_layers"), int(config.get("head_dim") or 256)
    window, every = int(config.get("sliding_window") or 0), int(config.get("sliding_window_pattern") or 6)
    kinds = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)
    ]
    if config.get("final_logit_softcapping") or config.get("attn_logit_softcapping"):
        raise ModelFileError("The runner torch does not support models with soft caps.")
    local = _rope_parameters(config, "sliding_attention").get("rope_theta") or config.get(
        "rope_local_base_freq", 10000.0
    )
    return _llama(
        config,
        head=head,
        rotary=_rotary(config, head),
        local_rotary=RotaryFrequencies(_speeds(float(local), head)),
        tied=bool(config.get("tie_word_embeddings", True)),
        head_norms=True,
        outer_norms=True,
        norm_from_one=True,
        gelu=True,
        embedding_scale=_integer(config, "hidden_size") ** 0.5,
        attention_scale=float(config.get("query_pre_attn_scalar", head)) ** -0.5,
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
    )


# Defaults that the files of some sizes omit.
_GEMMA3: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
}
_AROUND = ("gemma3", "mistral3")
"""Multimodal model types that contain one of these families."""
FAMILIES: Mapping[str, Callable[[Config], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _gemma3,
}


def _integer(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise ModelFileError(f"The model's config.json has no valid {key}; it must be an integer.")
    return value


def _rope_parameters(config: Config, kind: str = "full_attention") -> Config:
    """Return the parameters of rotary positions; newer files have them in one place, some per kind of
    layer.
    """
    value = config.get("rope_parameters") or config.get("rope_scaling") or {}
    inner = value.get(kind) if isinstance(value.get(kind), Mapping) else None
    return inner if inner is not None else value


def _speeds(base: float, width: int) -> tuple[float, ...]:
    return tuple(base ** (-2 * pair / width) for pair in range(width // 2))


def _rotary(config: Config, head: int) -> RotaryFrequencies:
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelFileError("The runner torch does not support models that rotate a part of a head.")
    scaling = _rope_parameters(config)
    base = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    speeds = _speeds(base, head)
    if kind == "default":
        return RotaryFrequencies(speeds)
    factor = float(scaling.get("factor", 1.0))
    if kind == "linear":
        return RotaryFrequencies(tuple(speed / factor for speed in speeds))
    if kind == "llama3":
        return RotaryFrequencies(tuple(_stretch_llama3(speed, scaling) for speed in speeds))
    raise ModelFileError(f"The runner torch does not support this scaling of positions ({kind}).")


def _stretch_llama3(speed: float, scaling: Config) -> float:
    """Keep frequencies that turn often within the trained length, and slow down those that turn rarely."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = float(scaling["original_max_position_embeddings"]) * speed / (2 * math.pi)
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return kept * speed + (1 - kept) * speed / factor
