"""The life of one engine, from its start to its end, and the signs that it gives."""

import asyncio
from collections.abc import Callable

from dragoman.engines.asked import asked
from dragoman.engines.protocol import Engine, LivingEngine, PulsingEngine
from dragoman.errors import Unavailable

INTERVAL_S = 0.25
PULSING_QUIET_S = 1.25
"""An engine that tells of its progress within a step is never silent for so long while it gets on."""
QUIET_S = 5.0


class Watch:
    """An engine gives a sign when it answers a check, or when its pulse has changed meanwhile.

    `silence` is for how long there was none. Only time in which this process ran is counted: a machine that
    slept, or an event loop that was held up, says nothing about the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._pulse: Callable[[], int] = lambda: 0
        self.quiet_s = QUIET_S
        if isinstance(engine, PulsingEngine):
            self._pulse = lambda: engine.pulse
            self.quiet_s = PULSING_QUIET_S
        self._seen = self._pulse()
        self._asked: asyncio.Future[None] | None = None
        self.silence = 0.0
        self.answered = asyncio.Event()
        """It has answered at least once."""
        self.trouble: Unavailable | None = None
        """What the engine says of itself, where it lives but cannot serve."""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the engine is gone."""

    @property
    def asking(self) -> bool:
        """A check is under way."""
        return self._asked is not None

    async def look(self) -> bool:
        """Whether the engine has answered within one interval. Raises what its check raised."""
        loop = asyncio.get_running_loop()
        if self._asked is None:
            self._asked = asyncio.ensure_future(_check(self.engine))
        began = loop.time()
        await asyncio.wait({self._asked}, timeout=INTERVAL_S)
        if not self._asked.done():
            self._count(min(loop.time() - began, 2 * INTERVAL_S))
            return False
        asked, self._asked = self._asked, None
        self.silence, self.trouble = 0.0, None
        try:
            asked.result()
        except Unavailable as error:
            self.trouble = error
        finally:
            # An error holds its frames: with this name in one of them, it would hold itself.
            del asked
        self.answered.set()
        return True

    def close(self) -> None:
        self.over.set_result(None)
        self.answered.set()
        if self._asked is not None and not self._asked.cancel():
            # Nobody will read what it says.
            self._asked.exception()

    def _count(self, passed: float) -> None:
        seen = self._pulse()
        self.silence = self.silence + passed if seen == self._seen else 0.0
        self._seen = seen


async def _check(engine: Engine) -> None:
    if isinstance(engine, LivingEngine):
        await asked(engine, "check")
