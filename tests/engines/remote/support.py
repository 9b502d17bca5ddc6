"""Servers of scripted engines, in threads, as upstreams of a remote engine."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

from dragoman.engines.protocol import Engine
from dragoman.engines.remote import RemoteEngine, RemoteOptions
from dragoman.engines.scripted import ByteTokenizer
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job, Sampling, Step

R = TypeVar("R")
QUICK = RemoteOptions(check_s=0.05, connect_s=5, silence_s=30)


def job_of(prompt: Sequence[int] = (1, 2, 3), **sampling: Any) -> Job:
    return Job(id="j", prompt=tuple(prompt), sampling=Sampling(**{"max_tokens": 64, **sampling}))


@contextmanager
def serving(*engines: Engine) -> Iterator[list[str]]:
    with ExitStack() as stack:
        settings = Settings(port=0, store="none", shutdown_grace=0)
        yield [stack.enter_context(background(engine, settings)) for engine in engines]


@asynccontextmanager
async def remote_of(urls: Sequence[str], options: RemoteOptions = QUICK) -> AsyncIterator[RemoteEngine]:
    engine = await RemoteEngine.connect(urls, ByteTokenizer(), options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def run(
    urls: Sequence[str], work: Callable[[RemoteEngine], Awaitable[R]], options: RemoteOptions = QUICK
) -> R:
    """What `work` gives, done with a remote engine over these servers."""

    async def main() -> R:
        async with remote_of(urls, options) as engine:
            return await work(engine)

    return asyncio.run(main())


async def steps_of(engine: Engine, job: Job) -> list[Step]:
    return [step async for step in engine.generate(job)]


def ids_of(steps: Sequence[Step]) -> list[int]:
    return [id_ for step in steps for id_ in step.ids]


async def becomes(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true within a generous time, while the event loop goes on."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)
    return True
