"""Small tokenizers of every kind, and that of the default model, as Hugging Face's library has them."""

from pathlib import Path

import gguf
import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from dragoman.engines.default_weights import default_model

CONTROL = ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
_CONTROL_TYPE = 3
_CORPUS = ("the quick brown fox jumps over the lazy dog", "naïve café, 12 + 30 = 42", "</s> <s> im_end <|>")


def default_tokenizer() -> Tokenizer:
    """SmolLM2's, from the vocabulary in its GGUF file."""
    fields = gguf.GGUFReader(default_model()).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TYPE])
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _CORPUS, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(list(CONTROL))
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("é!")])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """BPE over characters, with ▁ for a space and bytes for what is not in the vocabulary."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.train_from_iterator(
        _CORPUS, BpeTrainer(vocab_size=500, special_tokens=_with_bytes(), show_progress=False)
    )
    return _marked(tokenizer)


def unigram() -> Tokenizer:
    """Finds the longest words it knows, and would find control tokens too: they have the best scores."""
    words = sorted({char for text in _CORPUS for char in text.replace(" ", "▁")} | {"▁the", "▁qu", "ick"})
    vocabulary = [(token, 0.0) for token in _with_bytes()] + [(word, -5.0 - len(word) / 9) for word in words]
    tokenizer = Tokenizer(models.Unigram(vocabulary, 2, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]
    )
    return _marked(tokenizer)


def word_piece() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "quick", "##ly", "##er", "fox", ",", "."]
    tokenizer = Tokenizer(models.WordPiece({word: id_ for id_, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _with_bytes() -> list[str]:
    return [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]


def _marked(tokenizer: Tokenizer) -> Tokenizer:
    """A trainer marks all that it is told of as special, but bytes are not."""
    parts = msgspec.json.decode(tokenizer.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] in CONTROL]
    remade = Tokenizer.from_str(msgspec.json.encode(parts).decode())
    remade.add_special_tokens(list(CONTROL))
    return remade
