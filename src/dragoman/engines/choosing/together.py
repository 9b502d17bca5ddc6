"""The choices of one step, and the masks of the next.

What a constraint lets come next is known as soon as an id is chosen, long before there are logits for it. It
is worked out outside of Python, so several threads do that while the model computes. All else about a choice
is many short calls, in which threads would only wait for each other; so rows that no rule touches share them,
where the runner gives what that takes (`blocks.py`).
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec import Struct

from dragoman.engines.choosing.arrays import Logits
from dragoman.engines.choosing.blocks import draw_few, largest_ids, leaves_few
from dragoman.engines.choosing.continuation import Continuation
from dragoman.types import Step

# One by one, fewer rows take no longer.
_SEVERAL = 4


class Choice(Struct):
    answer: Continuation
    row: int
    """Which of all rows says what may come next; those behind it, what may come after each guess."""
    guesses: Sequence[int] = ()

    def advance(self, logits: Logits, token: int | None = None) -> Step:
        """The next id, if it is not chosen yet; and as long as that was guessed, the one after it."""
        step = self.answer.advance(logits[self.row], token)
        for row, guess in enumerate(self.guesses, self.row + 1):
            if step.finish is not None or step.ids[-1] != guess:
                break
            step = _joined(step, self.answer.advance(logits[row]))
        return step


class Choosers:
    def __init__(self, threads: int, ahead: int = 0) -> None:
        """`ahead`: so many ids that a constraint forces are of use before they are chosen."""
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(threads, "dragoman-mask") if threads > 1 else None
        self._begun: list[Future[None]] = []

    def advance(self, choices: Sequence[Choice], logits: Logits, maxima: Logits | None = None) -> list[Step]:
        """The next step of each continuation, in order; `maxima` are the largest of each block of a row."""
        for begun in self._begun:
            begun.result()
        chosen = {} if maxima is None else _chosen(choices, logits, maxima)
        steps = [choice.advance(logits, chosen.get(choice.row)) for choice in choices]
        going_on = (c.answer for c, step in zip(choices, steps, strict=True) if step.finish is None)
        self._begin([answer for answer in going_on if answer.constrained])
        return steps

    def _begin(self, constrained: Sequence[Continuation]) -> None:
        if self._pool is not None:
            self._begun = [self._pool.submit(answer.prepare, self._ahead) for answer in constrained]
        elif self._ahead:
            for answer in constrained:
                answer.prepare(self._ahead)

    def close(self) -> None:
        """What was begun is done, and its threads are gone."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _chosen(choices: Sequence[Choice], logits: Logits, maxima: Logits) -> dict[int, int | None]:
    """What can be chosen together, by row."""
    chosen: dict[int, int | None] = {}
    plain = {choice.row: choice.answer for choice in choices if choice.answer.plain}
    greedy = [row for row, answer in plain.items() if answer.sampling.temperature <= 0]
    few = {row: answer for row, answer in plain.items() if leaves_few(answer.sampling)}
    if len(greedy) >= _SEVERAL:
        chosen.update(zip(greedy, largest_ids(logits, maxima, greedy), strict=True))
    if len(few) >= _SEVERAL:
        asked, uniforms = [one.sampling for one in few.values()], [one.uniform() for one in few.values()]
        chosen.update(zip(few, draw_few(logits, maxima, [*few], asked, uniforms), strict=True))
    return chosen


def _joined(first: Step, second: Step) -> Step:
    """Two steps of one continuation as one."""
    second.ids = first.ids + second.ids
    if first.logprobs is not None:
        second.logprobs = first.logprobs + (second.logprobs or [])
    return second
