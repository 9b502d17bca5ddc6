"""Models for vLLM, made by the Python that has it: `python -m tests.engines.vllm.models GGUF FOLDER`.

`smollm2` are the default weights as safetensors, with `golden.json`: what transformers says with them. `tiny`
is a Llama of random weights with the same tokenizer; `poet` is an adapter for it, of random weights as well.
`seer` is an Idefics3 of random weights: of the models that see, one that vLLM runs without further packages.
`hearer` is a Qwen2-Audio, of random weights, too.
"""

import io
import json
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.media import Media
from tests.engines.transformers.seeing import picture, tone

PROMPTS = ("The capital of France is", "Once upon a time", "1, 2, 3, 4,")
GOLDEN_TOKENS = 12
RANK = 4
PICTURES = (1, 2, 3)
TONES = (440, 900, 1300)
BEFORE, BEHIND = list(range(600, 640)), [504, 2988, 282]


def make(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # What came out of a GGUF file refuses to be saved, until nothing says where it came from.
    config = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    real = LlamaForCausalLM(LlamaConfig(**config))
    real.load_state_dict(read.state_dict())
    save(folder / "smollm2", real, tokenizer)
    (folder / "smollm2" / "golden.json").write_text(json.dumps(golden(real, tokenizer)))
    torch.manual_seed(0)
    tiny = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    save(folder / "tiny", tiny, tokenizer)
    adapter(folder / "poet", tiny)


def make_seer(folder: Path) -> None:
    import torch
    from transformers import (
        AutoTokenizer,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
        LlamaConfig,
    )
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny")
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *rows]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Idefics3Config(
        vision_config=size | {"image_size": 28, "patch_size": 7},
        text_config=LlamaConfig(
            **size,
            vocab_size=len(tokenizer),
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            initializer_range=0.3,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=2,
        ),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    seer = Idefics3ForConditionalGeneration(config).float().eval()
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    processor = Idefics3Processor(image_processor=pictures, tokenizer=tokenizer, image_seq_len=4)
    seer.save_pretrained(folder / "seer")
    processor.save_pretrained(folder / "seer")
    items = [said_of(seer, processor, number) for number in PICTURES]
    (folder / "seer" / "golden.json").write_text(json.dumps(items))


def make_hearer(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoTokenizer,
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    torch.manual_seed(4)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny")
    marks = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    size = {"d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    text = Qwen2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    config = Qwen2AudioConfig(
        audio_config=size | {"num_mel_bins": 16},
        text_config=text,
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    hearer = Qwen2AudioForConditionalGeneration(config).float().eval()
    extractor = WhisperFeatureExtractor(feature_size=16)
    processor = Qwen2AudioProcessor(feature_extractor=extractor, tokenizer=tokenizer)
    hearer.save_pretrained(folder / "hearer")
    processor.save_pretrained(folder / "hearer")
    # transformers writes one level too many into the names; published files have those that vLLM looks for.
    weights = folder / "hearer" / "model.safetensors"
    named = {name.replace(".model.model.", ".model."): kept for name, kept in load_file(weights).items()}
    save_file(named, weights, metadata={"format": "pt"})
    rows = [said_of(hearer, processor, number) for number in TONES]
    (folder / "hearer" / "golden.json").write_text(json.dumps(rows))


def given_to(processor: Any, number: int) -> dict[str, Any]:
    """A picture, or a tone where the processor is one of those, as a model of transformers is given it."""
    from PIL import Image

    if hasattr(processor, "image_processor"):
        image = Image.open(io.BytesIO(picture(number).data))
        return dict(
            processor(text=["<image>"], images=[[image]], add_special_tokens=False, return_tensors="pt")
        )
    with wave.open(io.BytesIO(sound(number).data)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    heard = {"audio": [samples.astype(np.float32)], "sampling_rate": 16000}
    mapping = dict(processor(text="<|audio_bos|><|AUDIO|><|audio_eos|>", **heard, return_tensors="pt"))
    # The marks around it are written by the template.
    mapping["input_ids"] = mapping["input_ids"][:, 1:-1]
    return mapping


def sound(hertz: int) -> Media:
    """Long enough for a page of vLLM's to end in it."""
    return tone(hertz, seconds=1)


def said_of(model: Any, processor: Any, number: int) -> dict[str, list[int]]:
    """What stands for a picture or a tone, and what is said when text stands before and behind it."""
    import torch

    fields = given_to(processor, number)
    index = fields.pop("input_ids")[0].tolist()
    ids = torch.tensor([[*BEFORE, *index, *BEHIND]])
    fields["attention_mask"] = torch.ones_like(ids)
    result = model.generate(ids, max_new_tokens=GOLDEN_TOKENS, do_sample=False, eos_token_id=None, **fields)
    return {"place": index, "said": result[0, ids.shape[1] :].tolist()}


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def golden(model: Any, tokenizer: Any) -> dict[str, list[int]]:
    """The likeliest continuation of each prompt, as ids."""
    fields = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        result = model.generate(ids, max_new_tokens=GOLDEN_TOKENS, do_sample=False)
        fields[prompt] = result[0, ids.shape[1] :].tolist()
    return fields


def adapter(folder: Path, model: Any) -> None:
    import torch
    from safetensors.torch import save_file

    targets = {"q_proj", "v_proj", "o_proj"}
    weights = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            label = f"base_model.model.{name}"
            weights[f"{label}.lora_A.weight"] = torch.randn(RANK, module.in_features)
            weights[f"{label}.lora_B.weight"] = torch.randn(module.out_features, RANK)
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 64,
        "target_modules": sorted(targets),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    place = Path(sys.argv[2])
    if not (place / "made").exists():
        make(Path(sys.argv[1]), place)
        (place / "made").touch()
    make_seer(place)
    make_hearer(place)
