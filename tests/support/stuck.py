"""A model that begins and never goes on."""

import asyncio
from collections.abc import Sequence

from dragoman.engines.scripted import ScriptedEngine, say
from tests.support.parrot import parrot


class Stuck(ScriptedEngine):
    """Says one letter and no more; its vectors never come."""

    def __init__(self) -> None:
        super().__init__(say("x", fault="hang", fault_at=1), card=parrot().card)
        self._computing = 0

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        self._computing += 1
        try:
            await asyncio.Event().wait()
            raise AssertionError("It waits for ever.")
        finally:
            self._computing -= 1

    @property
    def busy(self) -> int:
        """Answers and vectors that it is asked for."""
        return self.live + self._computing
