"""The events of a response that is being made, for those who come back to its stream."""

import asyncio
from collections.abc import AsyncIterator

END = b"\n\n"


class EventLog:
    """Grows while the response is made. Any number of readers follow it, each from its own place."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._over = False
        self._grown = asyncio.Event()

    def add(self, events: bytes) -> None:
        if events:
            self._chunks.append(events)
            self._wake()

    def close(self) -> None:
        """No more events come."""
        self._over = True
        self._wake()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def whole(self) -> bytes:
        return b"".join(self._chunks)

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """The events that follow number `after`, those to come included; -1 gives all."""
        seen, skipped = 0, after + 1
        while True:
            grown, fresh = self._grown, b"".join(self._chunks[seen:])
            seen = len(self._chunks)
            if skipped and fresh:
                have = fresh.count(END)
                fresh, skipped = from_number(fresh, min(skipped, have)), max(skipped - have, 0)
            if fresh:
                yield fresh
            elif self._over:
                return
            else:
                await grown.wait()


def from_number(events: bytes, number: int) -> bytes:
    """The events of a whole log from this number on: they are numbered from 0, without a gap."""
    return END.join(events.split(END)[number:])
