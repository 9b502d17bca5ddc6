"""Tiny random models that see or hear, made on the spot."""

import io
import struct
import wave
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from dragoman.limits import Limits
from dragoman.media import Media
from dragoman.media.headers import read_media
from tests.support import tokenizers as make

VOCABULARY = 448
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
    "eos_token_id": None,
    "bos_token_id": None,
}
SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}


def picture(seed: int) -> Media:
    """Noise, a little higher than wide."""
    noise = Random(seed).randbytes(3 * 40 * 60)
    file = io.BytesIO()
    Image.frombytes("RGB", (40, 60), noise).save(file, "PNG")
    return read_media(file.getvalue(), "image", Limits(), "")


def tone(hertz: int, seconds: float = 0.5) -> Media:
    length = int(16000 * seconds)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16000, 0, "NONE", ""))
        writer.writeframes(b"".join(struct.pack("<h", 9999 * (n * hertz // 8000 % 2)) for n in range(length)))
    return read_media(file.getvalue(), "audio", Limits(), "")


def make_tokenizer(folder: Path, *tokens: str, **named: str) -> Any:
    import transformers

    tokenizer = make.byte_level()
    tokenizer.add_special_tokens(list(tokens))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<unk>", extra_special_tokens=named
    )
    fast.save_pretrained(folder)
    return fast


def make_llava(folder: Path) -> None:
    import torch
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    torch.manual_seed(0)
    tokenizer = make_tokenizer(folder, "<image>")
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIGHT, projection_dim=32),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        image_seq_length=16,
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    transformers.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
        ),
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


def make_idefics(folder: Path) -> None:
    """Pictures in tiles, with marks between them."""
    import torch
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    torch.manual_seed(1)
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    marks = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *rows)
    tokenizer = make_tokenizer(folder, *marks)
    config = transformers.Idefics3Config(
        vision_config=SIGHT,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=2,
    )
    transformers.Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    transformers.Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
    ).save_pretrained(folder)


class PadProcessor:
    """What Qwen-VL's processor does with pictures, without the part for videos, which needs more packages."""

    image_token = "<|image_pad|>"

    def __init__(self, tokenizer: Any) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        size = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
        self.image_processor = Qwen2VLImageProcessorPil(patch_size=7, merge_size=2, size=size)
        self._pad = tokenizer.convert_tokens_to_ids(self.image_token)

    def __call__(self, *, images: list[Any], **_kwargs: Any) -> dict[str, Any]:
        import torch

        mapping = dict(self.image_processor(images=images, return_tensors="pt"))
        ids = torch.full((1, int(mapping["image_grid_thw"].prod(dim=1).sum()) // 4), self._pad)
        ones = torch.ones_like(ids)
        return {"input_ids": ids, "attention_mask": ones, "mm_token_type_ids": ones, **mapping}


def make_qwen(folder: Path, version: int) -> PadProcessor:
    """Positions in three directions; and in the third version, rows for the first layers as well."""
    import torch
    import transformers

    torch.manual_seed(2)
    tokenizer = make_tokenizer(folder, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    number = tokenizer.convert_tokens_to_ids
    ids = {f"{each}_token_id": number(f"<|{each}_pad|>") for each in ("image", "video")}
    ids |= {f"vision_{each}_token_id": number(f"<|vision_{each}|>") for each in ("start", "end")}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    sight: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "patch_size": 7, "spatial_merge_size": 2}
    if version == 2:
        sight |= {"embed_dim": 32, "depth": 2, "mlp_ratio": 2}
        config = transformers.Qwen2VLConfig(
            text_config=TEXT | {"rope_parameters": rope}, vision_config=sight, **ids
        )
        transformers.Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    else:
        sight |= {"out_hidden_size": 32, "depth": 3, "intermediate_size": 64}
        sight |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
        text = TEXT | {"rope_parameters": rope | {"mrope_interleaved": True}, "head_dim": 8}
        config = transformers.Qwen3VLConfig(text_config=text, vision_config=sight, **ids)
        transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    return PadProcessor(tokenizer)


def make_gemma(folder: Path) -> None:
    """Reads a picture in both directions."""
    import torch
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    torch.manual_seed(3)
    marks = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tokenizer = make_tokenizer(folder, *marks.values(), **marks)
    config = transformers.Gemma3Config(
        text_config=TEXT
        | {"head_dim": 8, "query_pre_attn_scalar": 4, "sliding_window": 16, "num_hidden_layers": 3}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        vision_config=SIGHT,
        image_token_id=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        mm_tokens_per_image=16,
        tie_word_embeddings=False,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    # With what it begins with all pictures are the same, and it says the last id again and again.
    torch.nn.init.normal_(model.lm_head.weight)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.1)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    model.save_pretrained(folder)
    processor = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    transformers.Gemma3Processor(
        image_processor=processor, tokenizer=tokenizer, image_seq_length=16
    ).save_pretrained(folder)


def make_hearing(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(4)
    tokenizer = make_tokenizer(folder, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    config = transformers.Qwen2AudioConfig(
        audio_config={
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "num_mel_bins": 16,
        },
        text_config=transformers.Qwen2Config(**TEXT),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    transformers.Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=16), tokenizer=tokenizer
    ).save_pretrained(folder)
