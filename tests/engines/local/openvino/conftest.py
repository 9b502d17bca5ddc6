"""Small models of random weights, written as GGUF files with the vocabulary of the default model."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize

WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 64, 2, 4, 2, 96
ARCHITECTURES = ("llama", "qwen2", "qwen3")

pytest.importorskip("openvino", reason="OPENVINO IS NOT INSTALLED, so nothing of its runner is tested")


@pytest.fixture(scope="package", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Any:
    """What is converted here is kept apart from what the user has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAGOMAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def write_model(file: Path, vocabulary: Path, architecture: str = "llama", seed: int = 1) -> Path:
    random = np.random.default_rng(seed)
    writer = GGUFWriter(file, architecture)
    _write_vocabulary(writer, vocabulary)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "qwen3":
        writer.add_key_length(32)
        writer.add_value_length(32)

    def add(name: str, *shape: int) -> None:
        values = random.normal(size=shape, scale=0.3).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
        else:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    head = 32 if architecture == "qwen3" else WIDTH // HEADS
    add("token_embd.weight", 49152, WIDTH)
    add("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        for name, *shape in _layer(architecture, head):
            add(f"blk.{layer}.{name}", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _layer(architecture: str, head: int) -> list[tuple[Any, ...]]:
    tensors: list[tuple[Any, ...]] = [
        ("attn_norm.weight", WIDTH),
        ("attn_q.weight", HEADS * head, WIDTH),
        ("attn_k.weight", KV_HEADS * head, WIDTH),
        ("attn_v.weight", KV_HEADS * head, WIDTH),
        ("attn_output.weight", WIDTH, HEADS * head),
        ("ffn_norm.weight", WIDTH),
        ("ffn_gate.weight", INNER, WIDTH),
        ("ffn_up.weight", INNER, WIDTH),
        ("ffn_down.weight", WIDTH, INNER),
    ]
    if architecture == "qwen2":
        tensors += [("attn_q.bias", HEADS * head), ("attn_k.bias", KV_HEADS * head)]
        tensors += [("attn_v.bias", KV_HEADS * head)]
    if architecture == "qwen3":
        tensors += [("attn_q_norm.weight", head), ("attn_k_norm.weight", head)]
    return tensors


def _write_vocabulary(writer: GGUFWriter, source: Path) -> None:
    for name, value, kinds in _vocabulary(source):
        writer.add_key_value(name, value, kinds[0], kinds[1] if len(kinds) > 1 else None)


@cache
def _vocabulary(source: Path) -> list[tuple[str, Any, list[GGUFValueType]]]:
    return [
        (field.name, field.contents(), field.types)
        for field in GGUFReader(source).fields.values()
        if field.name.startswith("tokenizer.") and field.name != "tokenizer.chat_template"
    ]
