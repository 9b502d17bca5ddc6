"""How long a connection is waited for: its requests to come, and its client to read."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

Stage: TypeAlias = Literal["idle", "head", "body"]
"""What is being read: nothing, the head of a request, or what follows it."""
LOOKS = 4
"""How often a client that does not read is looked at before it is given up."""


class Deadline:
    """`late` is told the stage that took too long. A request that is there at once needs no timer."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: Mapping[Stage, float], late: Callable[[Stage], None]
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._late = late
        self._timer: asyncio.TimerHandle | None = None
        self._watched: tuple[Stage, int] = ("idle", 0)

    def watch(self, stage: Stage, number: int) -> None:
        """Each of the messages on a connection has deadlines of its own, whatever it sends meanwhile."""
        if (stage, number) == self._watched:
            return
        self.stop()
        self._watched = (stage, number)
        if stage != "idle":
            self._timer = self._loop.call_later(self._seconds[stage], self._end, stage)

    def stop(self) -> None:
        self._watched = ("idle", 0)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def let_go(self) -> None:
        """There is nobody to tell any more; without this, only the garbage collector would end the two."""
        self.stop()
        self._late = _nobody

    def _end(self, stage: Stage) -> None:
        self.stop()
        self._late(stage)


def _nobody(_: Stage) -> None:
    pass


class Stall:
    """Cuts off a client that takes nothing of what was written to it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport, seconds: float
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._seconds = seconds
        self._left = 0
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Nothing is written before `end`, so what is left shrinks as long as the client reads."""
        self._left = self._transport.get_write_buffer_size()
        self._since = self._loop.time()
        self._timer = self._loop.call_later(self._seconds / LOOKS, self._look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self._transport.get_write_buffer_size() < self._left:
            self.begin()
        elif self._loop.time() - self._since < self._seconds:
            self._timer = self._loop.call_later(self._seconds / LOOKS, self._look)
        else:
            self._transport.abort()
