"""The events of a response that is being made, for those who come back to its stream."""

import asyncio
from collections.abc import AsyncIterator

from dragoman.api.responses.wire import END, Written
from dragoman.api.sse import DONE, KEEP_ALIVE

FEW = 256
"""Additions to a log that are passed on at once, unless they have so many bytes:"""
MANY_BYTES = 256 * 1024


class EventLog:
    """Grows while the response is made. Any number of readers follow it, each from its own place."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self.size = 0
        self._over = False
        self._grown = asyncio.Event()

    def add(self, events: Written) -> None:
        if events:
            pieces = [events] if isinstance(events, bytes) else events
            self._chunks += pieces
            self.size += sum(map(len, pieces))
            self._wake()

    def close(self) -> None:
        """No more events come."""
        self._over = True
        self._wake()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def whole(self, ending: bytes) -> bytes:
        """All events and the last one. Joined, which lets other threads go on, as adding would not."""
        return b"".join([*self._chunks, ending])

    async def follow(self, after: int, keep_alive: float) -> AsyncIterator[bytes]:
        """The events that follow number `after`, those to come included; -1 gives all.

        Where none comes for a while there is a comment, which is no event and has no number.
        """
        seen, skipped = 0, after + 1
        while True:
            grown, begin, seen = self._grown, seen, self._few(seen)
            fresh = b"".join(self._chunks[begin:seen])
            if skipped and fresh:
                fresh, skipped = from_number(fresh, skipped), max(skipped - _count(fresh), 0)
            if fresh:
                yield fresh
            if seen < len(self._chunks):
                # A long log is no reason for others to wait.
                await asyncio.sleep(0)
            elif fresh:
                continue
            elif self._over:
                return
            else:
                try:
                    async with asyncio.timeout(keep_alive):
                        await grown.wait()
                except TimeoutError:
                    yield KEEP_ALIVE

    def _few(self, begin: int) -> int:
        """Where what is passed on at once ends: with the end of an event."""
        chunks, at, size = self._chunks, begin, 0
        while at < len(chunks) and (
            (at < begin + FEW and size < MANY_BYTES) or not chunks[at - 1].endswith(END)
        ):
            size += len(chunks[at])
            at += 1
        return at


def from_number(events: bytes, number: int) -> bytes:
    """The events from this number on, where the first has number 0. The end of the stream is always there."""
    return events[place_of(events, number) :]


def place_of(events: bytes, number: int) -> int:
    """Where the event with this number begins, or the end of the stream if there is none."""
    at = 0
    for _ in range(number):
        # One after the other: to count all of them at once would stop the process for as long.
        end = events.find(END, at)
        if end < 0 or events.startswith(DONE, at):
            break
        at = end + len(END)
    return at


def _count(events: bytes) -> int:
    return events.count(END) - events.endswith(DONE)
