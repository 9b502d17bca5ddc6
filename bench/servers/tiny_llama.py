"""A language model that costs next to nothing: `python -m bench.servers.tiny_llama FOLDER`, where vLLM is.

Two layers of random weights and a vocabulary of 2048, learnt from our documentation. What is measured with
it is everything but the model.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VOCABULARY = 2048
CONTEXT = 2048
END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer()
    words.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train([str(file) for file in sorted((ROOT / "docs").glob("*.md"))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=learner, eos_token=END, chat_template=TEMPLATE)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
