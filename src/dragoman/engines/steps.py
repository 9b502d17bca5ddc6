"""What engines that run jobs in a way of their own have in common: seeds, steps, and whom they reach."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from hashlib import blake2b
from typing import Protocol, TypeVar

from msgspec.structs import replace

from dragoman.engines.protocol import DirectEngine
from dragoman.types import Job, Sink, Step

# The seed of each of several answers, whether the engine makes them of one job or of one each.


def seed_of(seed: int, index: int) -> int:
    """The first has the seed as it was given. The others are no seed that somebody else would choose next."""
    if index == 0:
        return seed
    digest = blake2b(f"{seed} {index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


# Between the two ways to run a job: by an iterator for one continuation, and by calls back for all.


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


# Steps from an engine's thread to the event loops of those who wait for them.


_log = logging.getLogger("dragoman.engine")


class Receiver(Protocol):
    @property
    def sink(self) -> Sink: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...


R = TypeVar("R", bound=Receiver)


def deliver(said: Iterable[tuple[R, Step]], drop: Callable[[R], None]) -> None:
    """Hand all steps over in one go for each loop; nearly always there is only one.

    `drop` is told of a receiver that nobody listens to any more, on either thread.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[R, Step]]] = {}
    for entry in said:
        by_loop.setdefault(entry[0].loop, []).append(entry)
    for loop, entries in by_loop.items():
        try:
            loop.call_soon_threadsafe(_call_sinks, entries, drop)
        except RuntimeError:
            # The loop is closed, so nobody will ever read these.
            for receiver, _ in entries:
                drop(receiver)


def _call_sinks(entries: list[tuple[R, Step]], drop: Callable[[R], None]) -> None:
    """On the event loop's thread: one sink's trouble is not another's."""
    for receiver, step in entries:
        try:
            receiver.sink(step)
        except Exception:
            _log.exception("a sink raised; its job is dropped")
            drop(receiver)
