"""A runner that computes nothing but remembers everything, and short ways to ask for things."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from dragoman.engines.choosing.arrays import Logits
from dragoman.engines.local.runner import Rows, StepFailed, StepInterrupted
from dragoman.engines.local.scheduler import Scheduler, make_group
from dragoman.engines.local.sequence import Group
from dragoman.types import Adapters, Job, Sampling, Step

VOCABULARY = 101
END = 100
NO_LOOP = cast(asyncio.AbstractEventLoop, None)


def following(tokens: Sequence[int], adapters: Adapters = ()) -> int:
    """The id that comes after `tokens`: it depends on each of them and on their order."""
    value = sum(sum(map(ord, name)) * int(16 * scale) for name, scale in adapters)
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value % END


def expected(prompt: Sequence[int], count: int, adapters: Adapters = ()) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens, adapters))
    return tokens[len(prompt) :]


class FakeRunner:
    """Slots are lists of ids. It insists on right positions, as the real one does."""

    def __init__(
        self,
        *,
        slots: int = 4,
        context: int = 64,
        rows: int = 64,
        extra: int = 8,
        rewinds: bool = True,
        swaps: bool = False,
    ) -> None:
        self.slots = slots
        self.context = context
        self.vocabulary = VOCABULARY
        self.max_rows = rows + slots
        self.max_outputs = slots + extra
        self.rewinds = rewinds
        self.equal_pieces = False
        self.swaps = swaps
        self.adapters: tuple[str, ...] = ("red", "blue")
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.steps: list[Rows] = []
        self.step_adapters: list[Adapters] = []
        self.copies: list[tuple[int, int, int]] = []
        self.before_step: Callable[[], None] = lambda: None
        self.failing = False
        self.interrupted = False
        self.closed = False

    def warm_up(self) -> None:
        assert self.steps == []

    def step(self, rows: Rows, adapters: Adapters) -> Logits:
        assert 0 < len(rows) <= self.max_rows
        assert sum(rows.outputs) <= self.max_outputs
        self.interrupted = False
        self.before_step()
        if self.failing:
            raise StepFailed("as told")
        if self.interrupted:
            raise StepInterrupted
        self.steps.append(rows)
        self.step_adapters.append(adapters)
        found = []
        for token, position, slot, output in zip(
            rows.tokens, rows.positions, rows.slots, rows.outputs, strict=True
        ):
            held = self.held[slot]
            assert position == len(held) < self.context
            held.append(token)
            if output:
                found.append(row_of(following(held, adapters)))
        return np.array(found, np.float32).reshape(len(found), self.vocabulary)

    def keep(self, slot: int, length: int) -> None:
        assert length <= len(self.held[slot])
        assert self.rewinds or not length or length == len(self.held[slot])
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

    def interrupt(self) -> None:
        self.interrupted = True

    def embed(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[float] | None]:
        for prompt in prompts:
            yield None
            yield [float(len(prompt))]

    def close(self) -> None:
        self.closed = True


def row_of(best: int) -> Logits:
    """Logits whose maximum is at `best`, falling off with the distance."""
    return -np.abs(np.arange(VOCABULARY, dtype=np.float32) - best)


class Desk:
    """A scheduler over a fake runner, driven by hand."""

    def __init__(self, *, batch: int = 32, chunk: int = 8, **runner: Any) -> None:
        self.runner = FakeRunner(**runner)
        self.scheduler = Scheduler(self.runner, batch=batch, chunk=chunk)
        self.said: list[tuple[Group, Step]] = []

    def ask(self, prompt: Sequence[int], count: int = 4, **kinds: Any) -> Group:
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

    def cancel(self, group: Group, index: int | None = None) -> None:
        for sequence in group.sequences:
            if index is None or index == sequence.index:
                sequence.cancelled = True
        self.scheduler.drop_cancelled()
        self.said += self.scheduler.take()

    def steps_of(self, group: Group, index: int = 0) -> list[Step]:
        return [step for owner, step in self.said if owner is group and step.index == index]

    def ids(self, group: Group, index: int = 0) -> list[int]:
        return [token for step in self.steps_of(group, index) for token in step.ids]

    def finish(self, group: Group, index: int = 0) -> str | None:
        return self.steps_of(group, index)[-1].finish

    def cached(self, group: Group) -> int | None:
        return next(step for owner, step in self.said if owner is group).cached_tokens


def job(prompt: Sequence[int], count: int = 4, **kinds: Any) -> Job:
    """A greedy job; sampling fields and job fields may be mixed."""
    about_job = {name: kinds.pop(name) for name in list(kinds) if name in Job.__struct_fields__}
    sampling = Sampling(max_tokens=count, **{"temperature": 0.0, **kinds})
    return Job(**{"id": "job", "prompt": tuple(prompt), "sampling": sampling, **about_job})


def _ignore(step: Step) -> None:
    pass
