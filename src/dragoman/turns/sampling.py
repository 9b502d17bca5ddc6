"""What holds where a request says nothing of how to sample: the operator's word, then the model's."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dragoman.engines.protocol import ModelCard
from dragoman.engines.recommended import sensible
from dragoman.errors import SettingsError
from dragoman.turns.spec import TurnSpec
from dragoman.types import Sampling

LEAST, MOST = 2048, 16384
"""Between these is the length of an answer without a limit: a quarter of the context, if that is between."""


class Defaults(Struct, frozen=True):
    sampling: Mapping[str, float]
    max_tokens: int

    def applied(self, spec: TurnSpec) -> Sampling:
        """The sampling of a turn, with what its client left open."""
        open_ = {name: value for name, value in self.sampling.items() if name not in spec.chosen}
        sampling = replace(spec.sampling, **open_) if open_ else spec.sampling
        if sampling.max_tokens:
            return sampling
        return replace(sampling, max_tokens=max(self.max_tokens, sampling.min_tokens))


def defaults_of(card: ModelCard, operator: Mapping[str, Any], *, exact: bool = False) -> Defaults:
    """`exact`: the model's own distribution, whatever its makers recommend, because somebody trains on it."""
    told = dict(operator)
    usual = max(LEAST, min(card.max_model_len // 4, MOST))
    most = told.pop("max_tokens", usual)
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise SettingsError("`sampling`: max_tokens must be a number of tokens.", param="sampling")
    known = sensible(told)
    if wrong := sorted(told.keys() - known.keys()):
        message = f"`sampling`: {wrong[0]} is no field of the sampling, or its value is not one for it."
        raise SettingsError(message, param="sampling")
    # What a card says may come from anywhere: over a wire, a whole number is one with a point.
    sampling = known if exact else {**sensible(card.sampling), **known}
    # An engine that cannot do it is not asked for it by a default.
    return Defaults({name: sampling[name] for name in sampling if name not in card.refused}, most)


class Breakers:
    """The ids in which one of some texts stands: where DRY lets a repetition end.

    Looks through the vocabulary as one text, which is quicker than to look at each of its pieces.
    """

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
