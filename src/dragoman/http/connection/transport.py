"""A transport that closes in peace: the client gets to read what it was told last."""

import asyncio
from collections.abc import Callable

LINGER_S = 2.0
"""What a client that is still sending gets to notice that it was answered."""


class PatientTransport(asyncio.Transport):
    """Closing a socket with unread bytes resets it, and may take the answer from the client.

    So where the client is still sending (`mid_request`), our side is closed first. Either way it is over
    after `patience` seconds, even if the client never reads.
    """

    def __init__(self, inner: asyncio.Transport, mid_request: Callable[[], bool], patience: float) -> None:
        super().__init__()
        self._inner = inner
        self.mid_request = mid_request
        self._patience = patience
        self._closing = False
        self._end: asyncio.TimerHandle | None = None
        self._held: list[bytes | bytearray | memoryview] = []
        # The hot path: a token's bytes go straight to the real one.
        self.write = inner.write  # type: ignore[method-assign]
        self.get_extra_info = inner.get_extra_info  # type: ignore[method-assign]
        self.get_write_buffer_size = inner.get_write_buffer_size  # type: ignore[method-assign]
        self.pause_reading = inner.pause_reading  # type: ignore[method-assign]
        self.set_protocol = inner.set_protocol  # type: ignore[method-assign]

    def hold(self) -> None:
        """What is written until `release` leaves in one go."""
        self._held = []
        self.write = self._held.append  # type: ignore[method-assign, assignment]

    def release(self) -> None:
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
        self.release()
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
        """There is no connection any more, so nothing to wait for, and nobody to ask."""
        self.mid_request = bool
        if self._end is not None:
            self._end.cancel()
