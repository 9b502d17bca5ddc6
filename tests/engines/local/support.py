"""A scripted runner with slots, a scheduler that is driven by hand, and short ways to ask for things."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from dragoman.engines.local.runner import StepRows
from dragoman.engines.local.scheduler import Scheduler
from dragoman.engines.local.sequence import SequenceGroup, make_group
from dragoman.errors import ConstraintFailed
from dragoman.types import Job, Sampling, Step
from tests.engines.local.scripted import END, ScriptedRunner

NO_LOOP = cast(asyncio.AbstractEventLoop, None)


class FakeRunner(ScriptedRunner):
    """Slots are lists of ids. It insists on right positions, as the real one does."""

    def __init__(
        self,
        *,
        rewinds: bool = True,
        rereads: bool = False,
        swaps: bool = False,
        block: int = 1,
        **sizes: Any,
    ) -> None:
        super().__init__(**sizes)
        self.prefill_block = block
        self.can_truncate = rewinds
        self.decode_kv_differs = rereads
        self.swaps = swaps
        self.held: list[list[int]] = [[] for _ in range(self.slots)]
        self.copies: list[tuple[int, int, int]] = []

    def check(self, rows: StepRows) -> None:
        for slot in set(rows.slots):
            ours = [index for index, owner in zip(rows.positions, rows.slots, strict=True) if owner == slot]
            held = len(self.held[slot])
            assert ours == list(range(held, held + len(ours)))
            assert held + len(ours) <= self.context

    def write(self, rows: StepRows, number: int) -> Sequence[int]:
        held = self.held[rows.slots[number]]
        held.append(rows.tokens[number])
        return held

    def forget_all(self) -> None:
        self.held = [[] for _ in range(self.slots)]

    def truncate(self, slot: int, length: int) -> None:
        assert length <= len(self.held[slot])
        assert self.can_truncate or not length or length == len(self.held[slot])
        del self.held[slot][length:]

    def copy(self, source: int, target: int, length: int) -> None:
        assert source != target
        assert length <= len(self.held[source])
        self.copies.append((source, target, length))
        self.held[target] = self.held[source][:length]

    def swap(self, first: int, second: int) -> bool:
        if self.swaps:
            self.held[first], self.held[second] = self.held[second], self.held[first]
        return self.swaps


class Desk:
    """A scheduler over a fake runner, driven by hand."""

    def __init__(
        self,
        *,
        batch: int = 32,
        chunk: int = 8,
        guesses: int = 0,
        drafter: Any = None,
        **runner: Any,
    ) -> None:
        self.runner = FakeRunner(**runner)
        self.scheduler = Scheduler(self.runner, batch=batch, chunk=chunk, guesses=guesses, drafter=drafter)
        self.said: list[tuple[SequenceGroup, Step]] = []

    def ask(self, prompt: Sequence[int], count: int = 4, **kinds: Any) -> SequenceGroup:
        group = make_group(job(prompt, count, **kinds), _ignore, NO_LOOP, self.runner, frozenset({END}))
        self.scheduler.add(group)
        return group

    def step(self) -> None:
        self.scheduler.step()
        self.said += self.scheduler.take()

    def run(self, limit: int = 200) -> None:
        """Step until there is nothing left to do."""
        for _ in range(limit):
            if not self.scheduler.busy:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    def cancel(self, group: SequenceGroup, index: int | None = None) -> None:
        for sequence in group.sequences:
            if index is None or index == sequence.index:
                sequence.cancelled = True
        self.scheduler.drop_cancelled()
        self.said += self.scheduler.take()

    def steps_of(self, group: SequenceGroup, index: int = 0) -> list[Step]:
        return [step for owner, step in self.said if owner is group and step.index == index]

    def ids(self, group: SequenceGroup, index: int = 0) -> list[int]:
        return [token for step in self.steps_of(group, index) for token in step.ids]

    def finish(self, group: SequenceGroup, index: int = 0) -> str | None:
        return self.steps_of(group, index)[-1].finish

    def cached(self, group: SequenceGroup) -> int | None:
        return next(step for owner, step in self.said if owner is group).cached_tokens


def job(prompt: Sequence[int], count: int = 4, **kinds: Any) -> Job:
    """A greedy job; sampling fields and job fields may be mixed."""
    about_job = {name: kinds.pop(name) for name in list(kinds) if name in Job.__struct_fields__}
    sampling = Sampling(max_tokens=count, **{"temperature": 0.0, **kinds})
    return Job(**{"id": "job", "prompt": tuple(prompt), "sampling": sampling, **about_job})


def _ignore(step: Step) -> None:
    pass


class Path:
    """Allows given ids, one after the other; what comes after them is free or nothing."""

    def __init__(self, *ids: int, accepting: bool = False, broken: bool = False) -> None:
        self.left = list(ids)
        self._accepting = accepting
        self._broken = broken

    def new_matcher(self) -> "Path":
        return Path(*self.left, accepting=self._accepting, broken=self._broken)

    def mask(self, row: NDArray[np.float32]) -> None:
        if self._broken:
            raise ConstraintFailed("The grammar is broken.")
        kept = row[self.left[0]]
        row[:] = -np.inf
        row[self.left[0]] = kept

    def accept(self, id_: int) -> None:
        assert id_ == self.left.pop(0)

    @property
    def is_accepting(self) -> bool:
        return self.is_complete or self._accepting

    @property
    def is_complete(self) -> bool:
        return not self.left


class Interrupter:
    """A thread that interrupts again and again: what comes before a step has begun is not heard."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.001):
            self._interrupt()
