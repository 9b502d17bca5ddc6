"""A matcher that also keeps a list from holding the same string twice."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from dragoman.constrain.schema.unique import Watch
from dragoman.constrain.vocabulary import Matcher, Vocabulary
from dragoman.errors import ConstraintFailed

_MOST_TRIED = 4096


class WatchedMatcher(Matcher):
    def __init__(self, vocabulary: Vocabulary, native: LLMatcher, watch: Watch) -> None:
        super().__init__(vocabulary, native)
        self._watch = watch
        self._pieces = Pieces.of(vocabulary)

    def mask(self, row: NDArray[np.float32]) -> None:
        super().mask(row)
        forbidden = self._forbidden(row)
        if forbidden:
            row[forbidden] = -np.inf
            if not (row > -np.inf).any():
                raise self._fail("The constraint of this answer leaves nothing that may follow.")

    def accept(self, id_: int) -> None:
        super().accept(id_)
        if not self._watch.feed(self._pieces.of_id(id_)):
            raise self._fail("The same string may not come twice in this list.")

    def copy(self) -> "WatchedMatcher":
        other = WatchedMatcher(self.vocabulary, self._native.deep_copy(), self._watch.copy())
        other._ended, other._refused = self._ended, self._refused
        return other

    def _fail(self, message: str) -> ConstraintFailed:
        self._refused = message
        return ConstraintFailed(message)

    def _forbidden(self, row: NDArray[np.float32]) -> list[int]:
        """The ids that are still allowed, or not, and would write a string a second time."""
        open_list = self._watch.unique
        if open_list is None:
            return self._failing(self._pieces.with_quotes(4), row)
        if open_list.choices is not None:
            return self._failing(np.flatnonzero(row > -np.inf).tolist(), row)
        begun = bytes(self._watch.text)
        ends = [text[len(begun) :] for text in open_list.seen if text.startswith(begun)]
        found = [id_ for end in ends for id_ in self._pieces.beginning_with(end)]
        # Tokens that hold a whole string, or end one and hold another: there are few, so they are tried.
        return found + self._failing(self._pieces.with_quotes(3 if begun else 2), row)

    def _failing(self, ids: Sequence[int], row: NDArray[np.float32]) -> list[int]:
        tried = [id_ for id_ in ids if id_ < len(row) and row[id_] > -np.inf]
        if len(tried) > _MOST_TRIED:
            raise self._fail("The constraint of this answer took too long for one step.")
        return [id_ for id_ in tried if not self._watch.copy().feed(self._pieces.of_id(id_))]


class Pieces:
    """The bytes of the ids of a vocabulary, in order, so that those with one beginning are found at once."""

    _made: ClassVar["WeakKeyDictionary[Vocabulary, Pieces]"] = WeakKeyDictionary()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._texts = vocabulary.texts
        self._order = sorted(range(len(self._texts)), key=self._texts.__getitem__)
        self._sorted = [self._texts[id_] for id_ in self._order]
        quotes = [text.count(b'"') for text in self._texts]
        self._several = {least: [id_ for id_, n in enumerate(quotes) if n >= least] for least in (2, 3, 4)}

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> "Pieces":
        if vocabulary not in cls._made:
            cls._made[vocabulary] = cls(vocabulary)
        return cls._made[vocabulary]

    def of_id(self, id_: int) -> bytes:
        return self._texts[id_] if 0 <= id_ < len(self._texts) else b""

    def beginning_with(self, start: bytes) -> list[int]:
        first = bisect_left(self._sorted, start)
        # The first text behind all that begin so: 0xff is in no UTF-8.
        last = bisect_left(self._sorted, start + b"\xff" * 8, lo=first)
        return self._order[first:last]

    def with_quotes(self, least: int) -> list[int]:
        return self._several[least]
