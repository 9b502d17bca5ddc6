"""The choices of one step, and the masks of the next.

What a constraint lets come next is known as soon as an id is chosen, long before there are logits for it. It
is worked out outside of Python, so several threads do that while the model computes. All else about a choice
is many short calls, in which threads would only wait for each other.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec import Struct

from dragoman.engines.choosing.arrays import Logits
from dragoman.engines.choosing.continuation import Continuation
from dragoman.types import Step


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
        self._pool = ThreadPoolExecutor(threads, "dragoman-mask") if threads > 1 else None
        self._begun: list[Future[None]] = []

    def advance(self, choices: Sequence[Choice]) -> list[Step]:
        """The next step of each continuation, in order."""
        for begun in self._begun:
            begun.result()
        steps = [choice.advance() for choice in choices]
        self._begun = []
        if self._pool is not None:
            going_on = (c.answer for c, step in zip(choices, steps, strict=True) if step.finish is None)
            self._begun = [self._pool.submit(answer.prepare) for answer in going_on if answer.constrained]
        return steps

    def close(self) -> None:
        """What was begun is done, and its threads are gone."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _joined(first: Step, second: Step) -> Step:
    """Two steps of one continuation as one."""
    second.ids = first.ids + second.ids
    if first.logprobs is not None:
        second.logprobs = first.logprobs + (second.logprobs or [])
    return second
