"""A GGUF file of a few kilobytes that llama.cpp loads: one layer, and a vocabulary of bytes."""

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

WIDTH, HEADS, INNER = 32, 2, 32


def write_tiny(
    path: Path,
    template: str = "{{ messages[-1].content }}",
    *,
    tensors_a_file: int = 0,
    context: int = 128,
    seed: int = 1,
    architecture: str = "llama",
    layers: int = 1,
    kv_heads: Sequence[int] = (),
) -> Path:
    """`qwen2vl` has positions of several dimensions, `gemma3` norms around everything. `kv_heads` are of each
    layer, where they differ."""
    writer = gguf.GGUFWriter(str(path), architecture, split_max_tensors=tensors_a_file)
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(kv_heads or HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    if architecture == "qwen2vl":
        writer.add_rope_dimension_sections([4, 2, 2, 0])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab"]
    kinds = [2, 3, 3, *([6] * 256), 1, 1, 1]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(template)
    chance = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in _layer(architecture).items()}
    for layer, heads in enumerate(kv_heads):
        shapes |= {f"blk.{layer}.attn_{name}.weight": (heads * WIDTH // HEADS, WIDTH) for name in "kv"}
    shapes |= {"token_embd.weight": (len(tokens), WIDTH), "output_norm.weight": (WIDTH,)}
    for name, shape in shapes.items():
        writer.add_tensor(name, chance.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _layer(architecture: str) -> dict[str, tuple[int, ...]]:
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (WIDTH, WIDTH) for name in square}
    shapes |= {f"{name}.weight": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    if architecture == "qwen2vl":
        shapes |= {f"{name}.bias": (WIDTH,) for name in ("attn_q", "attn_k", "attn_v")}
    if architecture == "gemma3":
        shapes |= {f"{name}.weight": (WIDTH // HEADS,) for name in ("attn_q_norm", "attn_k_norm")}
        shapes |= {f"{name}.weight": (WIDTH,) for name in ("post_attention_norm", "post_ffw_norm")}
    return shapes


def write_split(path: Path) -> list[Path]:
    """`m.gguf` becomes `m-00001-of-00003.gguf` and so on."""
    write_tiny(path, tensors_a_file=4)
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def numbers(path: Path) -> list[list[tuple[int, int]]]:
    """Where the header has numbers and texts: for each entry of it, the places and sizes of its parts."""
    reader = gguf.GGUFReader(str(path))
    entries = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
    return [[*_places(entry)] for entry in entries]


def _places(entry: gguf.ReaderField) -> list[tuple[int, int]]:
    positions, at = [], int(entry.offset)
    for part in entry.parts:
        positions.append((at, part.nbytes))
        at += part.nbytes
    return positions
