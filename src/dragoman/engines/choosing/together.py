"""The choices of one step, by several threads at once.

The arithmetic of a choice, and the mask of a constraint, let other Python threads run meanwhile; and while
choices are made, the threads that compute the model have nothing to do.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from dragoman.engines.choosing.arrays import Logits
from dragoman.engines.choosing.continuation import Continuation
from dragoman.types import Step

# Handing work to a thread costs about as much as choosing by the largest logit a few times over.
_WORTH_SHARING = 4


class Choice(Struct):
    answer: Continuation
    rows: Logits
    """What may come next, and after each guess what may come then."""
    guesses: Sequence[int] = ()

    def advance(self) -> Step:
        """The next id; and as long as that is what was guessed, the one after it."""
        step = self.answer.advance(self.rows[0])
        for row, guess in zip(self.rows[1:], self.guesses, strict=True):
            if step.finish is not None or step.ids[-1] != guess:
                break
            step = _joined(step, self.answer.advance(row))
        return step


class Choosers:
    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads - 1, "dragoman-choose") if threads > 1 else None
        self._threads = threads

    def advance(self, choices: Sequence[Choice]) -> list[Step]:
        """The next step of each continuation, in order."""
        hard = sum(not choice.answer.takes_largest for choice in choices)
        if self._pool is None or hard < _WORTH_SHARING:
            return _advance(choices)
        shares = [choices[first :: self._threads] for first in range(self._threads)]
        others = [self._pool.submit(_advance, share) for share in shares[1:]]
        found = [_advance(shares[0]), *(other.result() for other in others)]
        return [found[place % self._threads][place // self._threads] for place in range(len(choices))]


def _advance(choices: Sequence[Choice]) -> list[Step]:
    return [choice.advance() for choice in choices]


def _joined(first: Step, second: Step) -> Step:
    """Two steps of one continuation as one."""
    second.ids = first.ids + second.ids
    if first.logprobs is not None:
        second.logprobs = first.logprobs + (second.logprobs or [])
    return second
