"""Starting a job on any engine, so that its steps arrive at a sink."""

import asyncio
import logging
from contextlib import aclosing

from dragoman.engines.protocol import DirectEngine, Engine, Handle
from dragoman.errors import DragomanError, EngineFailed
from dragoman.types import Job, Sink, Step

logger = logging.getLogger("dragoman.turns")


def start(engine: Engine, job: Job, sink: Sink) -> Handle:
    """The job's steps go to `sink`, on the event loop's thread, until all continuations are over."""
    if isinstance(engine, DirectEngine):
        return engine.submit(job, sink)
    return _Iteration(engine, job, sink)


class _Iteration:
    """A job of an engine that only iterates: one task that hands the steps on."""

    def __init__(self, engine: Engine, job: Job, sink: Sink) -> None:
        self._open = set(range(job.n))
        self._sink = sink
        self._task = asyncio.get_running_loop().create_task(self._run(engine, job))

    async def _run(self, engine: Engine, job: Job) -> None:
        try:
            async with aclosing(engine.generate(job)) as steps:  # type: ignore[type-var]
                async for step in steps:
                    if step.finish is not None:
                        self._open.discard(step.index)
                    self._sink(step)
            self._fail(EngineFailed("The engine ended before the answer did."))
        except DragomanError as error:
            self._fail(error)
        except Exception:
            # The foreign exception's text stays in the log: it may hold anything.
            logger.exception("The engine failed on job %s", job.id)
            self._fail(EngineFailed("The engine failed while it was writing the answer."))

    def _fail(self, error: DragomanError) -> None:
        for index in sorted(self._open):
            self._sink(Step([], index, finish="error", error=error))
        self._open.clear()

    def cancel(self, index: int | None = None) -> None:
        if index is None:
            self._open.clear()
        self._open.discard(index if index is not None else -1)
        if not self._open:
            self._task.cancel()
