"""A language model with random weights in the shape of a real one, and as many words, all made up."""

import random
import string
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench.servers.tiny_llama import END, TEMPLATE

SPECIAL = ("<|endoftext|>", "<|im_start|>", END)


class Shape(Struct, frozen=True, kw_only=True):
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int = 8192

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.width} ({self.inner} inside, {self.heads} heads,"
            f" {self.kv_heads} for keys and values), {self.vocabulary:,} tokens"
        )


SHAPES = {
    "1b": Shape(layers=16, width=2048, inner=8192, heads=32, kv_heads=8, vocabulary=128_256),
    "tiny": Shape(layers=2, width=64, inner=128, heads=2, kv_heads=2, vocabulary=4096),
}
"""`1b` is the shape of Llama 3.2 1B."""


def make(folder: Path, shape: Shape, device: str) -> None:
    """Weights and tokenizer, as files that `transformers` reads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer(shape.vocabulary)
    words.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def tokenizer(size: int) -> Any:
    """Bytes, and words that no text is cut into: every id that the model may say is worth a few letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    choose = random.Random(0)
    pieces = dict.fromkeys((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))
    while len(pieces) < size:
        pieces["Ġ" + "".join(choose.choices(string.ascii_lowercase, k=choose.randint(2, 7)))] = None
    result = Tokenizer(models.BPE(vocab={piece: id_ for id_, piece in enumerate(pieces)}, merges=[]))
    result.add_special_tokens(list(SPECIAL))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=result, eos_token=END, chat_template=TEMPLATE)
