"""Models for vLLM, made by the Python that has it: `python -m tests.engines.vllm.models GGUF FOLDER`.

`smollm2` are the default weights as safetensors, with `golden.json`: what transformers says with them. `tiny`
is a Llama of random weights with the same tokenizer; `poet` is an adapter for it, of random weights as well.
"""

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = ("The capital of France is", "Once upon a time", "1, 2, 3, 4,")
GOLDEN_TOKENS = 12
RANK = 4


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
    make(Path(sys.argv[1]), place)
    (place / "made").touch()
