"""The choices of one step, by several threads at once.

The arithmetic of a choice, and the mask of a constraint, let other Python threads run meanwhile; and while
choices are made, the threads that compute the model have nothing to do.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from dragoman.engines.choosing.arrays import Logits
from dragoman.engines.choosing.continuation import Continuation
from dragoman.types import Step

Choice: TypeAlias = tuple[Continuation, Logits]
# Handing work to a thread costs about as much as choosing by the largest logit a few times over.
_WORTH_SHARING = 4


class Choosers:
    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads - 1, "dragoman-choose") if threads > 1 else None
        self._threads = threads

    def advance(self, choices: Sequence[Choice]) -> list[Step]:
        """The next step of each continuation, in order."""
        hard = sum(not answer.takes_largest for answer, _ in choices)
        if self._pool is None or hard < _WORTH_SHARING:
            return _advance(choices)
        shares = [choices[first :: self._threads] for first in range(self._threads)]
        others = [self._pool.submit(_advance, share) for share in shares[1:]]
        found = [_advance(shares[0]), *(other.result() for other in others)]
        return [found[place % self._threads][place // self._threads] for place in range(len(choices))]


def _advance(choices: Sequence[Choice]) -> list[Step]:
    return [answer.advance(row) for answer, row in choices]
