"""The ids in which one of some texts stands: where DRY lets a repetition end."""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np


class Breakers:
    """Looks through the vocabulary as one text, which is quicker than to look at each of its pieces."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._vocabulary: tuple[bytes, np.ndarray[tuple[int], np.dtype[np.intp]]] | None = None
        self.ids = lru_cache(maxsize=64)(self._ids)

    def _ids(self, texts: tuple[str, ...]) -> frozenset[int]:
        if self._vocabulary is None:
            ends = np.fromiter(accumulate(map(len, self._pieces)), np.intp, len(self._pieces))
            self._vocabulary = b"".join(self._pieces), ends
        joined, ends = self._vocabulary
        found: set[int] = set()
        for text in {text.encode() for text in texts}:
            starts = np.fromiter((match.start() for match in re.finditer(re.escape(text), joined)), np.intp)
            first = ends.searchsorted(starts, side="right")
            # What goes beyond the end of its piece is in no id.
            found.update(first[starts + len(text) <= ends[first]].tolist())
        return frozenset(found)
