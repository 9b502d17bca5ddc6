"""Turns as server-sent events, written where the engine's step arrives."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from dragoman.http.exchange import Exchange
from dragoman.http.stream import Pump, TurnStream
from dragoman.turns.outlet import Speaker, Written, wait_patiently
from dragoman.turns.turn import Turn

R = TypeVar("R")


class Sse:
    """An outlet: the first bytes that are written begin the stream.

    With an `opening`, these are its bytes, and the stream begins when the first turn has.
    """

    def __init__(
        self,
        exchange: Exchange,
        pump: Pump,
        keep_alive: float,
        opening: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        self._exchange = exchange
        self._pump = pump
        self._keep_alive = keep_alive
        self._opening = opening
        self._started = False

    async def write(self, data: Written) -> None:
        if self._started:
            await self._exchange.write(*([data] if isinstance(data, bytes) else data))
        else:
            self._started = True
            await self._exchange.start_stream(data if isinstance(data, bytes) else b"".join(data))

    async def run(self, turn: Turn, speaker: Speaker) -> None:
        async with turn:
            if self._opening is not None and not self._started:
                # While it waits in line, what goes wrong can still be told by the status.
                await turn.begun(most=self._keep_alive)
                await self.write(await self._opening())
            written = TurnStream(
                turn, speaker.write, speaker.idle, self._exchange.send, self._pump, self._keep_alive
            )
            try:
                await written.done
            finally:
                written.close()

    async def wait(self, work: Awaitable[R], speaker: Speaker) -> R:
        return await wait_patiently(work, self._keep_alive, lambda: self.write(speaker.idle()))
