"""The heart of the servers without a model: one token for every stream at each step.

All servers are driven by the same few lines, so that they differ only in what becomes of a token. The steps
begin when all streams of a round are there, so that reading requests is no part of what is measured.
"""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

Beat: TypeAlias = Callable[[int], None]
"""Called with the number of the token: 0, 1, 2 and so on."""

PAUSE_S = 0.25
"""Between the last request and the first token; the client reads the clocks in it."""


class Pulse:
    def __init__(self, streams: int, tokens: int) -> None:
        self.tokens = tokens
        self._streams = streams
        self._waiting: list[Beat] = []

    def join(self, beat: Beat) -> None:
        self._waiting.append(beat)
        if len(self._waiting) == self._streams:
            beats, self._waiting = self._waiting, []
            asyncio.get_running_loop().call_later(PAUSE_S, self._step, beats, 0)

    def _step(self, beats: list[Beat], number: int) -> None:
        for beat in beats:
            beat(number)
        # One turn of the event loop per step: every stream writes its token before the next one is made.
        if number + 1 < self.tokens:
            asyncio.get_running_loop().call_soon(self._step, beats, number + 1)


class Collector:
    """A list and an event for each stream: how AsyncLLM of vLLM hands its output to a request's task."""

    def __init__(self, pulse: Pulse) -> None:
        self._last = pulse.tokens - 1
        self._ready: list[int] = []
        self._event = asyncio.Event()
        pulse.join(self._put)

    def _put(self, number: int) -> None:
        self._ready.append(number)
        self._event.set()

    async def get(self) -> list[int]:
        await self._event.wait()
        ready, self._ready = self._ready, []
        self._event.clear()
        return ready

    def ends(self, number: int) -> bool:
        return number == self._last
