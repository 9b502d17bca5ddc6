"""Law 7, from the client's side: leave a stream in whatever way, and the engine stops."""

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest

import dragoman
from dragoman.client import AsyncStream, Stream
from dragoman.engines.scripted import ScriptedEngine, say
from tests.client.support import HELLO
from tests.http.conftest import Serve, serve
from tests.support.wait import becomes

__all__ = ["serve"]


def hanging() -> ScriptedEngine:
    return ScriptedEngine(say("xyz", fault="hang", fault_at=1))


def by_break(stream: Stream) -> None:
    for _ in stream:
        break


def by_close(stream: Stream) -> None:
    events = iter(stream)
    next(events)
    stream.close()


def by_leaving_the_block(stream: Stream) -> None:
    with stream:
        next(iter(stream))


def by_an_exception(stream: Stream) -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in stream:
            raise ZeroDivisionError


def by_dropping(stream: Stream) -> None:
    events = iter(stream)
    next(events)
    del events
    gc.collect()


@pytest.mark.parametrize("leave", [by_break, by_close, by_leaving_the_block, by_an_exception, by_dropping])
def test_leaving_stops_the_engine(serve: Serve, leave: Callable[[Stream], None]) -> None:
    engine = hanging()
    with dragoman.Client(serve(engine)) as client:
        # The stream itself is kept: it is the iteration that is left.
        stream = client.chat(HELLO)
        leave(stream)
        assert becomes(lambda: len(engine.jobs) == 1 and engine.live == 0)


async def async_break(stream: AsyncStream) -> None:
    async for _ in stream:
        break


async def async_close(stream: AsyncStream) -> None:
    events = aiter(stream)
    await anext(events)
    await stream.aclose()


async def async_leaving_the_block(stream: AsyncStream) -> None:
    async with stream:
        await anext(aiter(stream))


async def async_dropping(stream: AsyncStream) -> None:
    events = aiter(stream)
    await anext(events)
    del events
    gc.collect()


async def async_cancel(stream: AsyncStream) -> None:
    begun = asyncio.Event()

    async def listen() -> None:
        async for _ in stream:
            begun.set()

    task = asyncio.create_task(listen())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "leave",
    [async_break, async_close, async_leaving_the_block, async_dropping, async_cancel],
)
def test_leaving_stops_the_engine_async(
    serve: Serve, leave: Callable[[AsyncStream], Awaitable[None]]
) -> None:
    engine = hanging()
    url = serve(engine)

    async def run() -> bool:
        # The client stays open: what hangs up is the leaving.
        async with dragoman.AsyncClient(url) as client:
            await leave(client.chat(HELLO))
            return await asyncio.to_thread(becomes, lambda: len(engine.jobs) == 1 and engine.live == 0)

    assert asyncio.run(run())


def test_a_stream_that_nobody_reads_is_not_sent(serve: Serve) -> None:
    engine = hanging()
    with dragoman.Client(serve(engine)) as client:
        client.chat(HELLO)
        client.models()
    assert engine.jobs == []
