"""How a model wants to be sampled: what its makers say, where they do.

The names are those of `Sampling`. What is no number, or beyond what a request could ask for, is left out: a
file with a strange value is still a model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

LLAMA_CPP: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""What llama.cpp's server takes where nobody says anything."""
_GGUF = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_k": (0, 2**31 - 1),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repetition_penalty": (1e-3, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


def in_gguf(metadata: Mapping[str, str]) -> dict[str, float]:
    """>>> in_gguf({"general.sampling.temp": "0.6", "general.name": "a"})
    {'temperature': 0.6}
    """
    return sensible({name: _number(metadata.get(key)) for key, name in _GGUF.items()})


def in_folder(folder: Path) -> dict[str, float]:
    """What generation_config.json says."""
    try:
        config = msgspec.json.decode((folder / "generation_config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return {}
    return sensible(config)


def sensible(config: Mapping[str, Any]) -> dict[str, float]:
    """Of a configuration, what says how to sample."""
    found: dict[str, float] = {}
    for name, (least, most) in _RANGES.items():
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            found[name] = int(value) if name == "top_k" else float(value)
    return found


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
