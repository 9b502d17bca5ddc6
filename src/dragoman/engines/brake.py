"""Holds an engine still while somebody changes its weights."""

import asyncio

from dragoman.engines.asked import asked
from dragoman.engines.protocol import Engine, TrainedEngine
from dragoman.errors import BadRequest, Conflict


class Brake:
    """One pause or resume at a time, however many ask."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._paused = False

    async def pause(self) -> None:
        """Asked for twice, it is one pause."""
        engine = self._trained()
        async with self._lock:
            if not self._paused:
                await asked(engine, "pause")
                self._paused = True

    async def resume(self, weight_version: str | None) -> None:
        engine = self._trained()
        async with self._lock:
            if not self._paused:
                raise Conflict("The engine is not paused; POST to /v1/engine/pause first.")
            await asked(engine, "resume", weight_version)
            self._paused = False

    def _trained(self) -> TrainedEngine:
        if not isinstance(self._engine, TrainedEngine):
            raise BadRequest("The weights of this engine cannot be changed.", code="unsupported_model")
        return self._engine
