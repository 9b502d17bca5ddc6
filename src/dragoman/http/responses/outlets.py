"""Where the events of a response go: to a client as server-sent events, or nowhere but its log."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from dragoman.api.responses.wire import Written
from dragoman.http.exchange import Exchange
from dragoman.http.stream import Pump, TurnStream
from dragoman.turns.turn import Turn
from dragoman.types import Event

R = TypeVar("R")


class Speaker(Protocol):
    """What turns the events of a turn into those of a response."""

    def write(self, events: Sequence[Event]) -> Written: ...

    def idle(self) -> Written:
        """What is said when there has been nothing to say for a while."""


class Outlet(Protocol):
    async def write(self, data: Written) -> None: ...

    async def run(self, turn: Turn, speaker: Speaker) -> None:
        """All events of a turn."""


class Quiet:
    """Nobody listens: the log keeps the events, or the whole response is asked for."""

    async def write(self, data: Written) -> None:
        pass

    async def run(self, turn: Turn, speaker: Speaker) -> None:
        async with turn:
            while not turn.over:
                speaker.write(await turn.next())


class Sse:
    """Server-sent events, written where the engine's step arrives."""

    def __init__(self, exchange: Exchange, pump: Pump, keep_alive: float) -> None:
        self._exchange = exchange
        self._pump = pump
        self._keep_alive = keep_alive
        self._started = False

    async def write(self, data: Written) -> None:
        if self._started:
            await self._exchange.write(*([data] if isinstance(data, bytes) else data))
        else:
            self._started = True
            await self._exchange.start_stream(data if isinstance(data, bytes) else b"".join(data))

    async def run(self, turn: Turn, speaker: Speaker) -> None:
        async with turn:
            written = TurnStream(
                turn, speaker.write, speaker.idle, self._exchange.send, self._pump, self._keep_alive
            )
            try:
                await written.done
            finally:
                written.close()


async def patiently(work: Awaitable[R], outlet: Outlet, idle: Callable[[], Written], period: float) -> R:
    """The result of some work; while it lasts the client is told that it does."""
    working = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({working}, timeout=period))[0]:
            await outlet.write(idle())
        return working.result()
    finally:
        working.cancel()
