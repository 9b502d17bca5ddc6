"""Models and projectors of a few kilobytes with random weights, with which llama.cpp sees and hears.

What they say is nonsense, and exactly as much nonsense wherever the same is computed.

kind       model      what is special
plain      llama      a picture is 16 positions, one after the other
mrope      qwen2vl    positions of two dimensions: a picture moves on by less than it has rows
whole      gemma3     rows of a picture see each other, so it is computed in one piece
sound      llama      it hears, and does not see
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import gguf
import numpy as np

from tests.support.tiny_gguf import HEADS, INNER, WIDTH, write_tiny

Kind: TypeAlias = Literal["plain", "mrope", "whole", "sound"]
Shapes: TypeAlias = dict[str, tuple[int, ...]]
ARCHITECTURES: Mapping[Kind, str] = {
    "plain": "llama",
    "mrope": "qwen2vl",
    "whole": "gemma3",
    "sound": "llama",
}
PATCH, SIDE, MELS, STACK = 8, 32, 80, 10
FRAMES = 1500
"""Of half a minute, which whisper's encoder always has."""


def write_pair(folder: Path, kind: Kind, context: int = 2048) -> tuple[Path, Path]:
    """A model, and its projector beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    model = write_tiny(folder / f"{kind}.gguf", context=context, architecture=ARCHITECTURES[kind], layers=2)
    return model, write_projector(folder / f"mmproj-{kind}.gguf", kind)


def write_projector(path: Path, kind: Kind, seed: int = 2, width: int = WIDTH) -> Path:
    """`width` is that of a model: another one than that of the tiny ones does not fit them."""
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_type("mmproj")
    hears = kind == "sound"
    writer.add_bool("clip.has_audio_encoder" if hears else "clip.has_vision_encoder", True)
    named = {"plain": "mlp", "mrope": "qwen2vl_merger", "whole": "gemma3", "sound": "ultravox"}
    writer.add_string("clip.projector_type", named[kind])
    shapes = _describe_audio(writer) if hears else _describe_vision(writer, kind)
    if width != WIDTH:
        shapes |= {"mm.2.weight": (width, WIDTH), "mm.2.bias": (width,)}
    chance = np.random.default_rng(seed)
    for name, shape in shapes.items():
        writer.add_tensor(name, chance.normal(0, 0.2, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe_vision(writer: gguf.GGUFWriter, kind: Kind) -> Shapes:
    _describe_encoder(writer, "vision")
    writer.add_uint32("clip.vision.image_size", SIDE)
    writer.add_uint32("clip.vision.patch_size", PATCH)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    writer.add_bool("clip.use_gelu", True)
    shapes = _layers("v")
    shapes["v.patch_embd.weight"] = (WIDTH, 3, PATCH, PATCH)
    if kind == "mrope":
        shapes["v.patch_embd.weight.1"] = (WIDTH, 3, PATCH, PATCH)
        merged = 4 * WIDTH
        shapes |= {"v.post_ln.weight": (WIDTH,), "v.post_ln.bias": (WIDTH,)}
        shapes |= {"mm.0.weight": (merged, merged), "mm.0.bias": (merged,)}
        shapes |= {"mm.2.weight": (WIDTH, merged), "mm.2.bias": (WIDTH,)}
        return shapes
    shapes["v.position_embd.weight"] = ((SIDE // PATCH) ** 2, WIDTH)
    if kind == "whole":
        writer.add_uint32("clip.vision.projector.scale_factor", 1)
        shapes |= {"v.post_ln.weight": (WIDTH,), "v.post_ln.bias": (WIDTH,)}
        return shapes | {"mm.input_projection.weight": (WIDTH, WIDTH), "mm.soft_emb_norm.weight": (WIDTH,)}
    return shapes | {
        "mm.0.weight": (WIDTH, WIDTH),
        "mm.0.bias": (WIDTH,),
        "mm.2.weight": (WIDTH, WIDTH),
        "mm.2.bias": (WIDTH,),
    }


def _describe_audio(writer: gguf.GGUFWriter) -> Shapes:
    _describe_encoder(writer, "audio")
    writer.add_uint32("clip.audio.num_mel_bins", MELS)
    writer.add_uint32("clip.audio.projector.stack_factor", STACK)
    shapes = _layers("a")
    shapes |= {"a.conv1d.1.weight": (WIDTH, MELS, 3), "a.conv1d.1.bias": (WIDTH, 1)}
    shapes |= {"a.conv1d.2.weight": (WIDTH, WIDTH, 3), "a.conv1d.2.bias": (WIDTH, 1)}
    shapes |= {"a.position_embd.weight": (FRAMES, WIDTH)}
    shapes |= {"a.post_ln.weight": (WIDTH,), "a.post_ln.bias": (WIDTH,)}
    shapes |= {"mm.a.norm_pre.weight": (STACK * WIDTH,), "mm.a.norm_mid.weight": (WIDTH,)}
    return shapes | {"mm.a.mlp.1.weight": (2 * WIDTH, STACK * WIDTH), "mm.a.mlp.2.weight": (WIDTH, WIDTH)}


def _describe_encoder(writer: gguf.GGUFWriter, sense: str) -> None:
    writer.add_uint32(f"clip.{sense}.embedding_length", WIDTH)
    writer.add_uint32(f"clip.{sense}.feed_forward_length", INNER)
    writer.add_uint32(f"clip.{sense}.projection_dim", WIDTH)
    writer.add_uint32(f"clip.{sense}.block_count", 1)
    writer.add_uint32(f"clip.{sense}.attention.head_count", HEADS)
    writer.add_float32(f"clip.{sense}.attention.layer_norm_epsilon", 1e-5)


def _layers(prefix: str) -> Shapes:
    shapes: Shapes = {}
    for name in ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down"):
        shapes[f"{prefix}.blk.0.{name}.weight"] = (WIDTH, WIDTH)
        if f"{prefix}.{name}" != "a.attn_k":
            shapes[f"{prefix}.blk.0.{name}.bias"] = (WIDTH,)
    for name in ("ln1", "ln2"):
        shapes |= {f"{prefix}.blk.0.{name}.weight": (WIDTH,), f"{prefix}.blk.0.{name}.bias": (WIDTH,)}
    return shapes
