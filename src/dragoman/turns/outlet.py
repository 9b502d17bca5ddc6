"""Where the turns of an answer go: to a client, or nowhere but what is made of them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from dragoman.turns.turn import Turn
from dragoman.types import Event

R = TypeVar("R")
Written: TypeAlias = bytes | list[bytes]
"""Bytes; or their pieces, where some are large and repeated: they are passed on as they are."""


class ClientGone(Exception):
    """The client closed the connection: nobody is there to answer."""


class Speaker(Protocol):
    """What turns the events of a turn into those of an API."""

    def write(self, events: Sequence[Event]) -> Written: ...

    def idle(self) -> Written:
        """What is said when there has been nothing to say for a while."""


class Outlet(Protocol):
    """Raises ClientGone where somebody was to be told and has left."""

    async def write(self, data: Written) -> None: ...

    async def run(self, turn: Turn, speaker: Speaker) -> None:
        """All events of a turn."""

    async def wait(self, work: Awaitable[R], speaker: Speaker) -> R:
        """The result of work that is no turn; while it lasts, the client is told that it does."""


class Quiet:
    """Nobody listens: the log keeps the events, or the whole answer is asked for."""

    async def write(self, data: Written) -> None:
        pass

    async def run(self, turn: Turn, speaker: Speaker) -> None:
        async with turn:
            while not turn.over:
                speaker.write(await turn.next())

    async def wait(self, work: Awaitable[R], speaker: Speaker) -> R:
        return await work


async def wait_patiently(work: Awaitable[R], period: float, still_waits: Callable[[], Awaitable[None]]) -> R:
    """The result of some work, with a sign of life after each period."""
    working = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({working}, timeout=period))[0]:
            await still_waits()
        return working.result()
    finally:
        working.cancel()
