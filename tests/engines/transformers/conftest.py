"""A tiny random Llama and a tiny random BERT, made on the spot."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import processors

from dragoman.engines.transformers import TransformersEngine, TransformersOptions
from tests.support import tokenizers as make

# More threads than cores that are free would wait for each other.
OPTIONS = TransformersOptions(context=128, slots=8, threads=1, device="cpu", page=16)
VOCABULARY = 384
"""More than there are tokens, as in many real models."""


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    folder = make.saved(make.byte_level(), tmp_path_factory.mktemp("llama"))
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
        eos_token_id=None,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = make.word_piece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    folder = make.saved(tokenizer, tmp_path_factory.mktemp("bert"))
    config = transformers.BertConfig(
        vocab_size=10,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def fresh(llama: Path) -> Iterator[TransformersEngine]:
    """An engine of its own, for tests that break or stop it."""
    engine = TransformersEngine.open(str(llama), OPTIONS)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def engine(llama: Path) -> Iterator[TransformersEngine]:
    transformers_engine = TransformersEngine.open(str(llama), OPTIONS)
    yield transformers_engine
    transformers_engine.close()
