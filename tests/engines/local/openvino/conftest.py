"""Small models of random weights, written as GGUF files with the vocabulary of the default model."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize

WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 64, 2, 4, 2, 96
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "granite", "smollm3", "phi3", "gemma3")

Q4_0, Q4_1, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
FEW_BITS = {"token_embd": Q8_0, "attn_v": Q8_0, "attn_output": Q4_0}
KINDS = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
MEASURES: dict[str, dict[str, Any]] = {
    "granite": {
        "attention.scale": 0.1,
        "embedding_scale": 3.0,
        "residual_scale": 0.4,
        "logit_scale": 2.0,
    },
    "phi3": {"rope.dimension_count": 8, "attention.sliding_window": 16},
    "qwen3moe": {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32},
    "gemma3": {"attention.sliding_window": 16, "rope.freq_base": 50000.0},
}
"""What architectures have beside the usual."""

pytest.importorskip("openvino", reason="OPENVINO IS NOT INSTALLED, so nothing of its runner is tested")


@pytest.fixture(scope="package", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Any:
    """What is converted here is kept apart from what the user has; and small files are as large ones."""
    from dragoman.engines.local.openvino import tensors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "LARGE", 0)
        patch.setenv("DRAGOMAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def write_model(
    file: Path,
    vocabulary: Path,
    architecture: str = "llama",
    seed: int = 1,
    more: dict[str, Any] | None = None,
    four_bits: bool = False,
    usual: GGMLQuantizationType = Q8_0,
    factors: bool = False,
) -> Path:
    """`more` are further measures in the file's metadata, without the architecture in front.

    `four_bits` are of three kinds, as in real files: some weights have more of them. `factors` are what
    speeds of rotation are divided by.
    """
    random = np.random.default_rng(seed)
    writer = GGUFWriter(file, architecture)
    _write_vocabulary(writer, vocabulary)
    head = 32 if architecture in ("qwen3", "qwen3moe", "gemma3") else WIDTH // HEADS
    layers = {"gemma3": 6, "smollm3": 4}.get(architecture, LAYERS)
    measures: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": WIDTH,
        "block_count": layers,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": head,
        **MEASURES.get(architecture, {}),
        **(more or {}),
    }
    for name, value in measures.items():
        writer.add_key_value(f"{architecture}.{name}", value, KINDS[type(value)])

    def add(name: str, *shape: int) -> None:
        values = random.normal(size=shape, scale=0.3).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values + 1)
        else:
            kind = FEW_BITS.get(name.split(".")[-2], Q4_1) if four_bits else usual
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", 49152, WIDTH)
    add("output_norm.weight", WIDTH)
    if factors:
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, head // 2, dtype=np.float32))
    for layer in range(layers):
        for name, *shape in _layer(architecture, head, measures):
            add(f"blk.{layer}.{name}", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_adapter(file: Path, model: Path, seed: int = 2, names: str = "blk.") -> Path:
    """A LoRA of all weights of a model whose names begin so, but for its norms."""
    rank = 4
    random = np.random.default_rng(seed)
    reader = GGUFReader(model)
    writer = GGUFWriter(file, str(reader.fields["general.architecture"].contents()))
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0 * rank)
    for tensor in reader.tensors:
        if tensor.name.startswith(names) and len(tensor.shape) > 1:
            inputs, outputs = map(int, tensor.shape)
            for name, shape in (("lora_a", (rank, inputs)), ("lora_b", (outputs, rank))):
                values = random.normal(size=shape, scale=0.15).astype(np.float32)
                writer.add_tensor(f"{tensor.name}.{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _layer(architecture: str, head: int, measures: dict[str, Any]) -> list[tuple[Any, ...]]:
    queries, keys = HEADS * head, KV_HEADS * head
    apart = [
        ("attn_q.weight", queries, WIDTH),
        ("attn_k.weight", keys, WIDTH),
        ("attn_v.weight", keys, WIDTH),
    ]
    gates: list[tuple[Any, ...]] = [("ffn_gate.weight", INNER, WIDTH), ("ffn_up.weight", INNER, WIDTH)]
    if architecture == "phi3":
        apart, gates = [("attn_qkv.weight", queries + 2 * keys, WIDTH)], [("ffn_up.weight", 2 * INNER, WIDTH)]
    down: list[tuple[Any, ...]] = [("ffn_down.weight", WIDTH, INNER)]
    if experts := measures.get("expert_count"):
        inner = measures["expert_feed_forward_length"]
        gates = [(f"ffn_{part}_exps.weight", experts, inner, WIDTH) for part in ("gate", "up")]
        down = [("ffn_down_exps.weight", experts, WIDTH, inner), ("ffn_gate_inp.weight", experts, WIDTH)]
    tensors: list[tuple[Any, ...]] = [
        ("attn_norm.weight", WIDTH),
        *apart,
        ("attn_output.weight", WIDTH, queries),
        ("ffn_norm.weight", WIDTH),
        *gates,
        *down,
    ]
    if architecture == "qwen2":
        tensors += [("attn_q.bias", queries), ("attn_k.bias", keys), ("attn_v.bias", keys)]
    if architecture in ("qwen3", "qwen3moe", "gemma3"):
        tensors += [("attn_q_norm.weight", head), ("attn_k_norm.weight", head)]
    if architecture == "gemma3":
        tensors += [("post_attention_norm.weight", WIDTH), ("post_ffw_norm.weight", WIDTH)]
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
