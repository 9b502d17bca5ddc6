"""A transport that closes gracefully, and timeouts for clients that do not send or read."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

Stage: TypeAlias = Literal["idle", "head", "body"]
"""What is being read: nothing, the head of a request, or its body."""
LOOKS = 4
"""Number of checks of a client that does not read, before it is disconnected."""
LINGER_S = 2.0
"""Seconds that a client that is still sending has to notice the reply."""


class LingeringTransport(asyncio.Transport):
    """A transport that does not lose replies when it closes.

    Closing a socket with unread bytes resets it, which may lose the reply. If the client is still sending
    (`mid_request`), our side is closed first. In any case the connection ends after `patience` seconds, even
    if the
    client never reads.
    """

    def __init__(self, inner: asyncio.Transport, mid_request: Callable[[], bool], patience: float) -> None:
        super().__init__()
        self._inner = inner
        self.mid_request = mid_request
        self._patience = patience
        self._closing = False
        self._end: asyncio.TimerHandle | None = None
        self._held: list[bytes | bytearray | memoryview] = []
        # The hot path: a token's bytes go directly to the inner transport.
        self.write = inner.write  # type: ignore[method-assign]
        self.get_extra_info = inner.get_extra_info  # type: ignore[method-assign]
        self.get_write_buffer_size = inner.get_write_buffer_size  # type: ignore[method-assign]
        self.pause_reading = inner.pause_reading  # type: ignore[method-assign]
        self.set_protocol = inner.set_protocol  # type: ignore[method-assign]

    def cork(self) -> None:
        """Buffer writes until `uncork`, which sends them together."""
        self._held = []
        self.write = self._held.append  # type: ignore[method-assign, assignment]

    def uncork_on_next_write(self) -> None:
        """Send the buffered bytes with the next write, or on `uncork`."""
        self.write = self._write_on  # type: ignore[method-assign]

    def _write_on(self, data: bytes | bytearray | memoryview) -> None:
        self._held.append(data)
        self.uncork()

    def uncork(self) -> None:
        held, self._held = self._held, []
        self.write = self._inner.write  # type: ignore[method-assign]
        if held and not self._inner.is_closing():
            self.write(b"".join(held))

    def is_closing(self) -> bool:
        return self._closing or self._inner.is_closing()

    def resume_reading(self) -> None:
        if not self._inner.is_closing():
            self._inner.resume_reading()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self.uncork()
        lingers = self.mid_request() and not self._inner.is_closing() and self._inner.can_write_eof()
        if lingers:
            self._inner.write_eof()
            self._inner.resume_reading()
        else:
            self._inner.close()
        loop = asyncio.get_running_loop()
        self._end = loop.call_later(LINGER_S if lingers else self._patience, self._inner.abort)

    def abort(self) -> None:
        self._closing = True
        self._inner.abort()

    def lost(self) -> None:
        """Break references after the connection is lost."""
        self.mid_request = bool
        if self._end is not None:
            self._end.cancel()


class ReadTimeout:
    """Calls `late` with the stage that took too long. A request that arrives at once needs no timer."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: Mapping[Stage, float], late: Callable[[Stage], None]
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._late = late
        self._timer: asyncio.TimerHandle | None = None
        self._watched: tuple[Stage, int] = ("idle", 0)

    def watch(self, stage: Stage, number: int) -> None:
        """Start the deadline of a stage; each message on a connection has its own, whatever else is sent."""
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
        """Break the reference cycle, which otherwise only the garbage collector would."""
        self.stop()
        self._late = _nobody

    def _end(self, stage: Stage) -> None:
        self.stop()
        self._late(stage)


def _nobody(_: Stage) -> None:
    pass


class WriteTimeout:
    """Disconnects a client that reads nothing of what was written to it."""

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
        """Start watching. Nothing is written before `end`, so the buffer shrinks while the client reads."""
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
