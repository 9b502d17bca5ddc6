"""Starting a job on any engine, so that its steps arrive at a sink."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from dragoman.engines.asked import is_cancelled, is_interrupt
from dragoman.engines.border import FAILED, Border
from dragoman.engines.protocol import Engine, Handle
from dragoman.engines.sound import wrong_iterator
from dragoman.engines.steps import single
from dragoman.errors import DragomanError, EngineFailed
from dragoman.types import Job, Sink, Step

logger = logging.getLogger("dragoman.engine")

STEPS_A_TURN = 16
"""After which an iterator that never waits lets others on the event loop go on."""
CLOSE_S = 10.0
"""That an iterator may take to close."""


def start(engine: Engine, job: Job, sink: Sink, tell: Callable[[str], None] | None = None) -> Handle:
    """The job's steps go to `sink`, on the event loop's thread, until all continuations are over.

    What the engine does wrong on the way goes to `tell`, or to the log.
    """
    # Not isinstance: with a protocol that takes longer than all else in the start of a job.
    submit: Callable[[Job, Sink], Handle] | None = getattr(engine, "submit", None)
    if submit is not None and getattr(engine, "checked", False):
        # What it hands on was checked when it came from the engine within.
        return submit(job, sink)
    border = Border(engine, job, sink, tell)
    border.begin(partial(_Iteration, engine, job, border) if submit is None else partial(submit, job))
    return border


def start_one(engine: Engine, job: Job, index: int, sink: Sink) -> Handle:
    """One continuation of several, for which there is a place before there is one for the others."""

    def one(step: Step) -> None:
        _name(step, index)
        sink(step)

    return start(engine, single(job, index), one)


def _name(step: Step, index: int) -> None:
    step.index = index
    if index:
        # The prompt is told of once, by the first continuation.
        step.cached_tokens = step.prompt_logprobs = None


class _Iteration:
    """A job of an engine that only iterates: one task per continuation, which hands its steps on."""

    def __init__(self, engine: Engine, job: Job, border: Border, sink: Sink) -> None:
        self._sink = sink
        self._border = border
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._run(engine, single(job, index), index)) for index in range(job.n)
        ]

    def cancel(self, index: int | None = None) -> None:
        running = asyncio.current_task()
        for task in self._tasks if index is None else self._tasks[index : index + 1]:
            # A task that hands on a step sees by itself that no more is wanted, and closes in peace.
            if task is not running:
                task.cancel()

    async def _run(self, engine: Engine, job: Job, index: int) -> None:
        try:
            made: Any = engine.generate(job)
            if wrong := wrong_iterator(made):
                self._border.fault(wrong, index)
                return
            try:
                await self._read(made, index)
            finally:
                await _close(made)
        except DragomanError as error:
            self._fail(index, error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self._border.fault("generate raised CancelledError, and nobody had cancelled it", index)
        except BaseException as error:
            # The foreign exception's text stays in the log: it may hold anything.
            logger.error("The engine %s failed on job %s", type(engine).__name__, job.id, exc_info=error)
            self._fail(index, EngineFailed(FAILED))
            if is_interrupt(error):
                raise

    async def _read(self, steps: AsyncGenerator[Step, None], index: int) -> None:
        count = 0
        async for step in steps:
            if isinstance(step, Step):
                _name(step, index)
            self._sink(step)
            if not self._border.open(index):
                return
            count += 1
            if not count % STEPS_A_TURN:
                await asyncio.sleep(0)
        self._fail(index, EngineFailed("The engine ended before the answer did."))

    def _fail(self, index: int, error: DragomanError) -> None:
        if self._border.open(index):
            self._sink(Step([], index, finish="error", error=error))


async def _close(steps: AsyncGenerator[Step, None]) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await steps.aclose()
    except TimeoutError:
        logger.warning("An iterator of the engine did not close within %.0f seconds", CLOSE_S)
