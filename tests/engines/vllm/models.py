"""Models for vLLM, made by the Python that has it: `python -m tests.engines.vllm.models GGUF FOLDER`.

`smollm2` are the default weights as safetensors, with `golden.json`: what transformers says with them. `tiny`
is a Llama of random weights with the same tokenizer; `poet` is an adapter for it, of random weights as well.
`seer` is an Idefics3 of random weights: of the models that see, one that vLLM runs without further packages.
"""

import io
import json
import sys
from pathlib import Path
from typing import Any

from tests.engines.transformers.seeing import picture

PROMPTS = ("The capital of France is", "Once upon a time", "1, 2, 3, 4,")
GOLDEN_TOKENS = 12
RANK = 4
PICTURES = (1, 2, 3)
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
    found = [said_of(seer, processor, number) for number in PICTURES]
    (folder / "seer" / "golden.json").write_text(json.dumps(found))


def said_of(model: Any, processor: Any, number: int) -> dict[str, list[int]]:
    """What stands for a picture, and what is said when text stands before and behind it."""
    import torch
    from PIL import Image

    image = Image.open(io.BytesIO(picture(number).data))
    given = dict(processor(text=["<image>"], images=[[image]], add_special_tokens=False, return_tensors="pt"))
    place = given.pop("input_ids")[0].tolist()
    ids = torch.tensor([[*BEFORE, *place, *BEHIND]])
    given["attention_mask"] = torch.ones_like(ids)
    said = model.generate(ids, max_new_tokens=GOLDEN_TOKENS, do_sample=False, eos_token_id=None, **given)
    return {"place": place, "said": said[0, ids.shape[1] :].tolist()}


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def golden(model: Any, tokenizer: Any) -> dict[str, list[int]]:
    """The likeliest continuation of each prompt, as ids."""
    found = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        said = model.generate(ids, max_new_tokens=GOLDEN_TOKENS, do_sample=False)
        found[prompt] = said[0, ids.shape[1] :].tolist()
    return found


def adapter(folder: Path, model: Any) -> None:
    import torch
    from safetensors.torch import save_file

    targets = {"q_proj", "v_proj", "o_proj"}
    weights = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            place = f"base_model.model.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, module.in_features)
            weights[f"{place}.lora_B.weight"] = torch.randn(module.out_features, RANK)
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
