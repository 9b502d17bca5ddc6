"""Steps as an async iterator, for engines that call back."""

import asyncio
from collections.abc import AsyncGenerator

from dragoman.engines.protocol import DirectEngine
from dragoman.types import Job, Step


async def iterate(engine: DirectEngine, job: Job) -> AsyncGenerator[Step, None]:
    """`generate` in terms of `submit`. Leaving the iteration early cancels the job; an error is raised."""
    steps: asyncio.Queue[Step] = asyncio.Queue()
    handle = engine.submit(job, steps.put_nowait)
    left = job.n
    try:
        while left:
            step = await steps.get()
            if step.error is not None:
                raise step.error
            left -= step.finish is not None
            yield step
    finally:
        handle.cancel()
