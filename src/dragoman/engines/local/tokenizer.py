"""The vocabulary of a GGUF file as a Tokenizer."""

import ctypes
from collections.abc import Mapping

from dragoman.engines.local.model import Model

_UNKNOWN, _CONTROL = 1 << 0, 1 << 3
PIECE = 64 * 1024


class LlamaTokenizer:
    """Text to ids by the model's own rules, and the bytes of every id."""

    def __init__(self, model: Model) -> None:
        # Keeps the model alive too: the vocabulary is part of it.
        self._model = model
        library = self._library = model.library
        vocab = self._vocab = library.model_get_vocab(model.pointer)
        size = library.vocab_n_tokens(vocab)
        self.pieces: list[bytes] = [self._piece(token) for token in range(size)]
        self.special: dict[str, int] = {
            self.pieces[token].decode(errors="replace"): token
            for token in range(size)
            if library.vocab_get_attr(vocab, token) & (_UNKNOWN | _CONTROL)
        }
        self.bos_id = _present(library.vocab_bos(vocab))
        self.eos_id = _present(library.vocab_eos(vocab))
        self.end_ids = frozenset(token for token in range(size) if library.vocab_is_eog(vocab, token))
        self.add_bos: bool = library.vocab_get_add_bos(vocab)
        self.infill = self._infill()

    def encode(self, text: str) -> list[int]:
        """The ids of `text` as plain text: "<|im_end|>" gives the ids of its characters."""
        data = text.encode()
        # No tokenizer makes more tokens than bytes, but for the few that put a space in front.
        room = len(data) + 8
        ids = (ctypes.c_int32 * room)()
        count = self._library.tokenize(self._vocab, data, len(data), ids, room, False, False)
        if count < 0:
            room = -count
            ids = (ctypes.c_int32 * room)()
            count = self._library.tokenize(self._vocab, data, len(data), ids, room, False, False)
        found: list[int] = []
        for at in range(0, count, PIECE):
            # Not in one call, which would keep the interpreter to itself.
            found += ids[at : min(at + PIECE, count)]
        return found

    def texts(self, ids: Mapping[str, int]) -> dict[str, str]:
        """What named tokens are as text: `{"pad_token": 2}` gives `{"pad_token": "<|im_end|>"}`."""
        return {
            name: self.pieces[token].decode(errors="replace")
            for name, token in ids.items()
            if token < len(self.pieces)
        }

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        length = self._library.token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = self._library.token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[:length]

    def _infill(self) -> tuple[int, int, int] | None:
        library, vocab = self._library, self._vocab
        prefix = _present(library.vocab_fim_pre(vocab))
        suffix = _present(library.vocab_fim_suf(vocab))
        middle = _present(library.vocab_fim_mid(vocab))
        if prefix is None or suffix is None or middle is None:
            return None
        return prefix, suffix, middle


def _present(token: int) -> int | None:
    return token if token >= 0 else None
