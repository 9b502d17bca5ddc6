"""Small tokenizers of every kind, and that of the default model, as Hugging Face's library has them."""

from pathlib import Path

import gguf
import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from dragoman.engines.weights import default_model

CONTROL = ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
_CONTROL_TYPE = 3
_CORPUS = ("the quick brown fox jumps over the lazy dog", "naïve café, 12 + 30 = 42", "</s> <s> im_end <|>")


def default_tokenizer() -> Tokenizer:
    """SmolLM2's, from the vocabulary in its GGUF file."""
    fields = gguf.GGUFReader(default_model()).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    made = Tokenizer(models.BPE({token: id_ for id_, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    made.add_special_tokens([t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TYPE])
    return made


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        _CORPUS, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(list(CONTROL))
    made.add_tokens([AddedToken("<tool>"), AddedToken("é!")])
    return made


def sentence_piece() -> Tokenizer:
    """BPE over characters, with ▁ for a space and bytes for what is not in the vocabulary."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.train_from_iterator(
        _CORPUS, BpeTrainer(vocab_size=500, special_tokens=_with_bytes(), show_progress=False)
    )
    return _marked(made)


def unigram() -> Tokenizer:
    """Finds the longest words it knows, and would find control tokens too: they have the best scores."""
    words = sorted({char for text in _CORPUS for char in text.replace(" ", "▁")} | {"▁the", "▁qu", "ick"})
    vocabulary = [(token, 0.0) for token in _with_bytes()] + [(word, -5.0 - len(word) / 9) for word in words]
    made = Tokenizer(models.Unigram(vocabulary, 2, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    return _marked(made)


def word_piece() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "quick", "##ly", "##er", "fox", ",", "."]
    made = Tokenizer(models.WordPiece({word: id_ for id_, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    made.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return made


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _with_bytes() -> list[str]:
    return [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]


def _marked(made: Tokenizer) -> Tokenizer:
    """A trainer marks all that it is told of as special, but bytes are not."""
    parts = msgspec.json.decode(made.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] in CONTROL]
    remade = Tokenizer.from_str(msgspec.json.encode(parts).decode())
    remade.add_special_tokens(list(CONTROL))
    return remade
