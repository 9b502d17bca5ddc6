"""Between the two ways to run a job: by an iterator for one continuation, and by calls back for all."""

import asyncio
from collections.abc import AsyncGenerator

from msgspec.structs import replace

from dragoman.engines.protocol import DirectEngine
from dragoman.engines.seeds import seed_of
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


def single(job: Job, index: int) -> Job:
    """One continuation as a job of its own, with a seed of its own."""
    if job.n == 1:
        return job
    sampling = job.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=seed_of(sampling.seed, index))
    if index and sampling.prompt_logprobs is not None:
        # The prompt is told of once, by the first continuation.
        sampling = replace(sampling, prompt_logprobs=None)
    return replace(job, id=f"{job.id}-{index}", n=1, sampling=sampling)
