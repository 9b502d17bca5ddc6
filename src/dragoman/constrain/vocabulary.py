"""Token ids for constraints, prepared once per model, and the state of one answer in a constraint."""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from dragoman.errors import ConstraintFailed

_END = b"<|end of a constrained answer|>"
# What a byte of a mask adds to eight logits: zero, or minus infinity for a bit that is not set.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ADDED = np.where(_BITS, np.float32(0), np.float32(-np.inf))
# A text has few prefixes that are ids.
_MOST_FORCED = 32
_FORESEEING_S = 0.001


class Vocabulary:
    """A model's ids for constraints: `pieces` are the bytes of each id, `special` the ids of special tokens
    by text.

    Ids without bytes, and special tokens, never count as text: `"<b>"` in a grammar means those three
    characters, and `<[5]>` or `<|im_end|>` the special token.
    """

    def __init__(self, pieces: Sequence[bytes], special: Mapping[str, int], end_ids: Collection[int]) -> None:
        self.size = len(pieces)
        self.special = dict(special)
        self.end_ids = frozenset(end_ids)
        wrong = [id_ for id_ in (*special.values(), *end_ids) if not 0 <= id_ < self.size]
        if wrong:
            raise ValueError(f"id {wrong[0]} is not in a vocabulary of {self.size} ids")
        self._ends = np.array(sorted(self.end_ids), dtype=np.int64)
        # Special tokens are identified by name. One without a name would be allowed wherever another is.
        names = {id_: f"<|id {id_}|>".encode() for id_ in (*special.values(), *self.end_ids)}
        names |= {id_: text.encode() for text, id_ in special.items() if text}
        tokens = [names.get(id_, piece) for id_, piece in enumerate(pieces)]
        self.texts = [b"" if id_ in names else piece for id_, piece in enumerate(pieces)]
        # An end id of our own, above all others, means "the grammar accepts here". The model's own end ids
        # can then be markers in a grammar, as harmony's <|call|> is.
        self.native = LLTokenizer(
            _Wrapper([*tokens, _END], sorted({*names, *self.end_ids, self.size})),  # type: ignore[arg-type]
            eos_token=self.size,
        )
        self.mask_words = (self.size + 1 + 31) // 32
        self._kept = threading.local()

    def forbid(self, words: NDArray[np.uint32], row: NDArray[np.float32]) -> None:
        """Set ids that the bits do not allow to minus infinity; allow end ids if the grammar accepts."""
        if not hasattr(self._kept, "added"):
            # Allocating a new array of this size would take longer than the rest of this function.
            self._kept.added = np.empty((words.nbytes, 8), np.float32)
        added: NDArray[np.float32] = self._kept.added.reshape(-1)
        np.take(_ADDED, words.view(np.uint8), axis=0, out=self._kept.added, mode="clip")
        if not added[self.size]:
            added[self._ends] = 0
        size = min(self.size, len(row))
        row[:size] += added[:size]
        row[size:] = -np.inf

    def allowed(self, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return the mask as bits: one for each allowed id, and none above the vocabulary."""
        array = words.copy()
        last, bit = divmod(self.size, 32)
        accepts = int(array[last]) >> bit & 1
        array[last] &= np.uint32((1 << bit) - 1)
        if accepts:
            np.bitwise_or.at(array, self._ends >> 5, np.uint32(1) << (self._ends & 31).astype(np.uint32))
        return array


class _Wrapper:
    """The tokenizer interface that `LLTokenizer` requires. It never encodes: grammars are stepped by ids."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = len(tokens) - 1

    def __call__(self, text: str | bytes) -> list[int]:
        return []


class GrammarMatcher:
    """State of one answer in a grammar: `mask(row)` forbids ids that cannot come next, `accept(id)` advances.

    It never fails open: if the next ids cannot be computed, it raises `ConstraintFailed`.
    """

    def __init__(self, vocabulary: Vocabulary, native: LLMatcher) -> None:
        self.vocabulary = vocabulary
        self._native = native
        self._words = np.zeros(vocabulary.mask_words, dtype=np.uint32)
        self._masked = False
        self._ended = False
        self._refused: str | None = None

    def precompute_mask(self) -> None:
        """Compute the next mask. If that fails, `mask` fails."""
        with suppress(ConstraintFailed):
            self._bits()

    def forced_tokens(self, most: int) -> list[int]:
        """Return up to `most` ids that must come next, in the fewest ids that spell them."""
        numbers: list[int] = []
        ahead, until = self, time.perf_counter() + _FORESEEING_S
        with suppress(ConstraintFailed):
            while len(numbers) < most and (id_ := ahead._find_forced()) is not None:
                numbers.append(id_)
                if time.perf_counter() > until:
                    break
                ahead = self.copy() if ahead is self else ahead
                ahead.accept(id_)
        return numbers

    def mask(self, row: NDArray[np.float32]) -> None:
        """Set the logits of all ids that may not come next to minus infinity."""
        self.vocabulary.forbid(self._bits(), row)

    def bitmask(self) -> NDArray[np.uint32]:
        """Return the mask as bits, for rows on another device."""
        return self.vocabulary.allowed(self._bits())

    def allowed(self, id_: int) -> bool:
        """Whether the mask of this step allows the id."""
        row = np.zeros(self.vocabulary.size, dtype=np.float32)
        self.mask(row)
        return bool(0 <= id_ < len(row) and row[id_] == 0)

    def accept(self, id_: int) -> None:
        """Advance by the sampled id."""
        self._check()
        marker = 0 <= id_ < self.vocabulary.size and self._has(self._bits(), id_)
        if not marker:
            if id_ not in self.vocabulary.end_ids or not self.is_accepting:
                self._refused = f"The id {id_} is not allowed next by the constraint of this answer."
                raise ConstraintFailed(self._refused)
            self._ended, self._masked = True, False
            return
        self._masked = False
        self._native.consume_token(id_)
        self._check()

    @property
    def is_complete(self) -> bool:
        """Whether only an end id may follow."""
        return self._ended or (self.error is None and self._native.is_stopped())

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return self._ended or (self.error is None and self._native.is_accepting())

    @property
    def error(self) -> str | None:
        """Why the matcher failed, or None."""
        if self._refused is None and self._native.is_error():
            self._refused = "The constraint of this answer took too long or too much memory for one step."
        return self._refused

    def copy(self) -> "GrammarMatcher":
        """Return an independent matcher in the same state, for another answer."""
        other = GrammarMatcher(self.vocabulary, self._native.deep_copy())
        other._ended, other._refused = self._ended, self._refused
        return other

    def _bits(self) -> NDArray[np.uint32]:
        """Return one bit per id, computed once per step; the bit above all ids means that the grammar
        accepts.
        """
        self._check()
        if not self._masked:
            if self._ended:
                self._words[:] = 0
                self._set(self.vocabulary.size)
            else:
                self._native.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            self._check()
            if not self._words.any():
                self._refused = "The constraint of this answer allows no further token."
                self._check()
            self._masked = True
        return self._words

    def _find_forced(self) -> int | None:
        """Return the longest id of a text that must come next."""
        chain = self._chain()
        if len(chain) > 1:
            # The longest id may contain more than must come: after a quote, a colon without a space before
            # it.
            probe = self.copy()
            probe.accept(chain[0])
            if not probe._chain():
                return None
        return chain[-1] if chain else None

    def _chain(self) -> list[int]:
        """Return all ids that may come next, shortest first, if each begins with the one before it."""
        words = self._bits()
        indices = np.flatnonzero(words)
        if indices.size > _MOST_FORCED:
            return []
        ids = [
            32 * offset + bit for offset in indices.tolist() for bit in range(32) if words[offset] >> bit & 1
        ]
        if ids[-1] >= self.vocabulary.size:
            return []
        texts = self.vocabulary.texts
        ids.sort(key=lambda id_: len(texts[id_]))
        return ids if all(texts[a] and texts[b].startswith(texts[a]) for a, b in pairwise(ids)) else []

    def _check(self) -> None:
        if self.error is not None:
            raise ConstraintFailed(self.error)

    def _set(self, id_: int) -> None:
        self._words[id_ >> 5] |= np.uint32(1 << (id_ & 31))

    @staticmethod
    def _has(words: NDArray[np.uint32], id_: int) -> bool:
        return bool((int(words[id_ >> 5]) >> (id_ & 31)) & 1)


END = 256


@cache
def byte_vocabulary() -> Vocabulary:
    return Vocabulary([*(bytes([byte]) for byte in range(256)), b""], {}, [END])
