"""Tiny models with random weights, one of each family, as `transformers` makes and saves them."""

from pathlib import Path
from typing import Any

from tests.support import tokenizers

VOCABULARY = 384
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, biased": ("LlamaConfig", {"attention_bias": True}),
    "llama, stretched": ("LlamaConfig", {"rope_parameters": STRETCHED}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3, tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 20}),
}


def make(folder: Path, family: str = "llama", seed: int = 1) -> Any:
    """The model of `transformers`, which is saved in the folder with a tokenizer of bytes."""
    import torch
    import transformers

    kind, more = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**SIZE | more)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.data.add_(torch.randn_like(weight) * 0.1)
        if name == "lm_head.weight":
            # Sure of what comes next, so that rounding does not decide.
            weight.data.mul_(20)
    model.save_pretrained(folder)
    tokenizers.saved(tokenizers.byte_level(), folder)
    return model
