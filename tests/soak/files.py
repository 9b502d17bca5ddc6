"""The models, the adapters and the projector of a soak, and the command that serves them."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.engines.default_weights import default_model
from tests.engines.local.test_adapters import RANK, WIDTH, write_adapter
from tests.support.tiny_gguf import write_tiny
from tests.support.tiny_projectors import write_projector

TINY, SEEING = "tiny", "seeing"
"""The names of the two models beside the default one."""
ADAPTERS = ("red", "blue")
KV_MIB = {"openvino": 256, "llamacpp": 256, "torch": 512}
"""Small, so that pages of the KV cache are evicted within a minute."""


def make_command(runner: str, folder: Path) -> list[str]:
    """Write its files into that folder, and return the command."""
    adapters, seeing = folder / "adapters", folder / SEEING
    for path in (adapters, seeing):
        path.mkdir()
    for seed, name in enumerate(ADAPTERS):
        if runner == "torch":
            _write_peft(adapters / name, seed)
        else:
            write_adapter(adapters / name, seed, 0.3)
    models = {
        TINY: {"model": str(write_tiny(folder / "tiny.gguf")), "kv_memory": 16, "runner": "llamacpp"},
        SEEING: _describe_seeing(write_projector(seeing / "mmproj.gguf", "plain", width=WIDTH)),
    }
    command = [sys.executable, "-m", "dragoman", "serve", str(default_model()), "--runner", runner]
    command += ["--models", json.dumps(models), "--lora-dir", str(adapters), "--data-dir", str(folder)]
    command += ["--kv-memory", str(KV_MIB[runner]), "--log-json"]
    # What the others promise for one reader, torch promises only so.
    return [*command, "--deterministic"] if runner == "torch" else command


def _describe_seeing(projector: Path) -> dict[str, Any]:
    """The default model with a projector of random weights, over llama.cpp, which alone has pictures."""
    return {
        "model": str(default_model()),
        "mmproj": str(projector),
        "runner": "llamacpp",
        "context": 2048,
        "kv_memory": 128,
        "deterministic": True,
    }


def _write_peft(folder: Path, seed: int) -> None:
    """A LoRA of the first three layers' query projections, as PEFT writes it, for torch."""
    from safetensors.numpy import save_file

    random, weights = np.random.default_rng(seed), {}
    for layer in range(3):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for part, shape in (("A", (RANK, WIDTH)), ("B", (WIDTH, RANK))):
            values = 0.3 * random.normal(size=shape)
            weights[f"{name}.lora_{part}.weight"] = values.astype(np.float32)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
