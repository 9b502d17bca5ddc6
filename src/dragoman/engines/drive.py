"""Starting a job on any engine, so that its steps arrive at a sink."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from dragoman.engines.protocol import Engine, Handle
from dragoman.engines.steps import single
from dragoman.errors import DragomanError, EngineFailed
from dragoman.types import Job, Sink, Step

logger = logging.getLogger("dragoman.engine")


def start(engine: Engine, job: Job, sink: Sink) -> Handle:
    """The job's steps go to `sink`, on the event loop's thread, until all continuations are over."""
    # Not isinstance: with a protocol that takes longer than all else in the start of a job.
    submit: Callable[[Job, Sink], Handle] | None = getattr(engine, "submit", None)
    if submit is not None:
        return submit(job, sink)
    return _Iteration(engine, job, sink)


class _Iteration:
    """A job of an engine that only iterates: one task per continuation, which hands its steps on."""

    def __init__(self, engine: Engine, job: Job, sink: Sink) -> None:
        self._sink = sink
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._run(engine, single(job, index), index)) for index in range(job.n)
        ]

    async def _run(self, engine: Engine, job: Job, index: int) -> None:
        try:
            async with aclosing(engine.generate(job)) as steps:  # type: ignore[type-var]
                async for step in steps:
                    step.index = index
                    if index:
                        # The prompt is told of once, by the first continuation.
                        step.cached_tokens = step.prompt_logprobs = None
                    self._sink(step)
                    if step.finish is not None:
                        return
            self._fail(index, EngineFailed("The engine ended before the answer did."))
        except DragomanError as error:
            self._fail(index, error)
        except Exception:
            # The foreign exception's text stays in the log: it may hold anything.
            logger.exception("The engine failed on job %s", job.id)
            self._fail(index, EngineFailed("The engine failed while it was writing the answer."))

    def _fail(self, index: int, error: DragomanError) -> None:
        self._sink(Step([], index, finish="error", error=error))

    def cancel(self, index: int | None = None) -> None:
        for task in self._tasks if index is None else self._tasks[index : index + 1]:
            task.cancel()
