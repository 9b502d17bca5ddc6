"""An engine over one of the runners, and short ways to ask it for things."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, TypeAlias

from dragoman.engines.local import LocalEngine
from dragoman.engines.local.runner import PagedRunner, StepRows
from dragoman.engines.sampling import Logits
from dragoman.types import Job, Step
from tests.engines.local.scripted import ScriptedRunner, expected
from tests.engines.local.support import job

NEAR_TIE = 0.5
"""Between log probabilities. Kernels round otherwise in other company, but not by as much."""
PATIENCE = 120
Known: TypeAlias = dict[tuple[object, ...], list[int]]


class Subject:
    """What a job leaves in the engine's memory is for the same test only, unless it says otherwise."""

    def __init__(self, engine: LocalEngine, salt: str, known: Known) -> None:
        self.engine = engine
        self._known = known
        self.runner = engine._runner
        self.salt = salt
        self.rereads = isinstance(self.runner, PagedRunner) and self.runner.decode_kv_differs
        self.exact = "llama.cpp" not in engine.card.details.get("runner", "")
        """Whether answers are the same whatever runs beside them, with the options of the tests."""
        self.scripted = isinstance(self.runner, ScriptedRunner)
        self.prompt, self.long_prompt = self._counted(8), self._counted(28)
        self.end = min(engine.tokenizer.end_ids)

    def job(self, prompt: Sequence[int], count: int = 6, **kinds: Any) -> Job:
        return job(prompt, count, **{"cache_salt": self.salt, **kinds})

    async def collect(self, prompt: Sequence[int], count: int = 6, **kinds: Any) -> list[Step]:
        return [step async for step in self.engine.generate(self.job(prompt, count, **kinds))]

    def run(self, prompt: Sequence[int], count: int = 6, **kinds: Any) -> list[Step]:
        return asyncio.run(self.collect(prompt, count, **kinds))

    def together(self, *jobs: Job) -> list[list[Step]]:
        async def main() -> list[list[Step]]:
            heard = [SubmittedJob(self.engine, each) for each in jobs]
            return [await each.all() for each in heard]

        return asyncio.run(main())

    def known(self, prompt: Sequence[int], count: int = 6) -> list[int]:
        """How a greedy answer must begin, whoever else is computed and whatever is cached.

        All of it where it is scripted. Of a real model as much as comes before the first near tie.
        """
        key = (self.engine, *prompt, count)
        if key not in self._known:
            self._known[key] = expected(prompt, count) if self.scripted else self._sure(prompt, count)
        return self._known[key]

    def _sure(self, prompt: Sequence[int], count: int) -> list[int]:
        steps = self.run(prompt, count, logprobs=2, reuse_prefix=False)
        logprobs = [entry for step in steps for entry in step.logprobs or ()]
        sure = takewhile(lambda entry: entry.top[0][1] - entry.top[1][1] > NEAR_TIE, logprobs)
        numbers = [entry.id for entry in sure]
        assert numbers, "of this answer nothing is known"
        return numbers

    def _counted(self, numbers: int) -> list[int]:
        """How counting goes on is plain to a small model as well. Scripts need no sense."""
        if self.scripted:
            return [index % 40 for index in range(3 * numbers)]
        return self.engine.tokenizer.encode("".join(f"{number}, " for number in range(1, numbers + 1))[:-1])


class SubmittedJob:
    """A job that was submitted, and its steps as the sink gets them."""

    def __init__(self, engine: LocalEngine, asked: Job, begun: Callable[[], None] = lambda: None) -> None:
        """`begun` is called with the first step."""
        self.steps: list[Step] = []
        self._begun = begun
        self._over = asyncio.Event()
        self._left = asked.n
        self.handle = engine.submit(asked, self._take)

    def _take(self, step: Step) -> None:
        if not self.steps:
            self._begun()
        self.steps.append(step)
        self._left -= step.finish is not None
        if not self._left:
            self._over.set()

    async def all(self) -> list[Step]:
        """The steps, once every continuation has ended."""
        await asyncio.wait_for(self._over.wait(), PATIENCE)
        return self.steps


class Gate:
    """Stands before a runner's steps: it counts them, and may hold them up."""

    def __init__(self, runner: Any) -> None:
        self._step = runner.step
        self._runner = runner
        self._open = threading.Event()
        self._open.set()
        self._reached = threading.Event()
        self.rows = 0

    def __enter__(self) -> "Gate":
        self._runner.step = self._pass
        return self

    def __exit__(self, *error: object) -> None:
        self._open.set()
        del self._runner.step

    def _pass(self, rows: StepRows) -> Logits:
        self._reached.set()
        assert self._open.wait(PATIENCE)
        self.rows += len(rows)
        logits: Logits = self._step(rows)
        return logits

    def shut(self) -> None:
        self._reached.clear()
        self._open.clear()

    async def reached(self) -> None:
        """Return when a step waits before the gate."""
        assert await asyncio.to_thread(self._reached.wait, PATIENCE)

    def open(self) -> None:
        self._open.set()


def ids(steps: list[Step], index: int = 0) -> list[int]:
    return [token for step in steps if step.index == index for token in step.ids]


def ends(steps: list[Step]) -> list[str]:
    return [step.finish for step in steps if step.finish is not None]
