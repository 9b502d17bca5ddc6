"""A file of requests, answered line by line: what came of each is in one of two files.

However many lines there are, memory holds those that are at work: lines are read as they are needed, and
what came of them is written when it is there, in the order in which it came. Whoever is killed goes on where
it was: what is in the two files is done, and is known by its `custom_id` (of which a number of eight bytes is
kept). Of a line that was cut off in the middle nothing is left, and it is asked again.

A line stands behind everybody's own requests (`behind` in turns/queue.py). Where its place is needed it
steps back, and is asked again later; so it is where the engine is gone or the server stops. Everything else
that can go wrong with a line is its answer.
"""

import asyncio
import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, Protocol, TypeVar

import numpy as np
from msgspec import Struct, field

from dragoman.api.batches import Asked, LineReply, LineSpelling, said_of, usage_in, usage_of_line
from dragoman.errors import StoreUnavailable
from dragoman.store.disk import open_bytes, write_all
from dragoman.turns.queue import behind
from dragoman.types import Usage

logger = logging.getLogger("dragoman.batches")

T = TypeVar("T")
READ_BYTES = 256 * 1024
"""Of lines that are read in one go, or one of them."""
FLYING_BYTES = 32 * 1024 * 1024
"""Of lines that are at work, or one of them."""
AGAIN = frozenset({429, 503, 529})
"""The server's trouble, not the line's."""
LONGEST_REST_S = 30.0
DISK_REST_S = 2.0
SYNC_S = 1.0
GATHER_S = 0.05
"""What comes within so many seconds is written at once."""
MOST_UNWRITTEN = 256


class Do(Protocol):
    """Has something done that is slow of a disk."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class LineCounts(Struct):
    completed: int = 0
    failed: int = 0
    undone: int = 0
    """Lines of which it was said that they were not asked."""
    usage: Usage = field(default_factory=Usage)


def lines_of(source: IO[bytes], longest: int = -1) -> Iterator[bytes]:
    """Without their ends, and without those that are empty."""
    while line := source.readline(longest):
        if stripped := line.strip():
            yield stripped


class SeenIds:
    """Tells ids that come twice, by a number of eight bytes for each."""

    def __init__(self) -> None:
        self._key = os.urandom(16)
        self._seen: set[int] = set()

    def has_seen(self, custom_id: str) -> bool:
        number = number_of(custom_id, self._key)
        if number in self._seen:
            return True
        self._seen.add(number)
        return False


def number_of(custom_id: str, key: bytes) -> int:
    """Nobody who does not know the key finds two ids with one number."""
    digest = blake2b(custom_id.encode(errors="surrogatepass"), digest_size=8, key=key)
    return int.from_bytes(digest.digest())


class LinesRun:
    """`await LinesRun(source, good, bad, ...).run()` returns when all lines of the source are done.

    `good` has what went well, `bad` the rest; they may be one file. `most()` lines are at work at a time.
    """

    def __init__(
        self,
        source: Path,
        good: Path,
        bad: Path,
        spelling: LineSpelling,
        answer: Callable[[Asked], Awaitable[LineReply]],
        most: Callable[[], int],
        do: Do,
    ) -> None:
        self.counts = LineCounts()
        self._source, self._good, self._bad = source, good, bad
        self._spelling = spelling
        self._answer = answer
        self._most = most
        self._do = do
        self._key = os.urandom(16)
        self._done: np.ndarray[tuple[int], np.dtype[np.uint64]] = np.zeros(0, np.uint64)
        """What stands for the lines that were done before."""
        self._flying: dict[asyncio.Task[LineReply], Asked] = {}
        self._flying_bytes = 0
        self._again: deque[Asked] = deque()
        self._pressed: set[asyncio.Task[LineReply]] = set()
        self._finished: list[tuple[str, LineReply]] = []
        self._changed = asyncio.Event()
        self._comes = asyncio.Event()
        """There is something to be written, or there will be no more."""
        self._over = False
        self._read_all = False
        self._rest = 0.0
        """Seconds to wait before the next line, where the last could not be answered at all."""
        self._synced = 0.0

    async def run(self) -> None:
        await self._do(self.recover)
        writing = asyncio.create_task(self._write_always())
        try:
            with await self._do(partial(open_bytes, self._source)) as source:
                lines = lines_of(source)
                few: deque[Asked] = deque()
                while (asked := await self._next(few, lines)) is not None:
                    await self._room()
                    self._start(asked)
                    # One after the other: to plan a hundred of them at once would hold up everybody.
                    await asyncio.sleep(0)
        finally:
            for task in self._flying:
                task.cancel()
            await asyncio.gather(*self._flying, return_exceptions=True)
            self._over = True
            self._comes.set()
            await writing

    # What was done before

    def recover(self) -> None:
        """Reads what is done off the two files, and cuts off what is half written."""
        self.counts = LineCounts()
        found = array("Q")
        for place in dict.fromkeys((self._good, self._bad)):
            if place.exists():
                self._recover(place, found)
        self._done = np.sort(np.frombuffer(found, np.uint64)) if found else np.zeros(0, np.uint64)

    def _recover(self, place: Path, found: "array[int]") -> None:
        whole = 0
        with place.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                found.append(number_of(said_of(line), self._key))
                outcome = self._spelling.outcome(line)
                setattr(self.counts, outcome, getattr(self.counts, outcome) + 1)
                if outcome == "completed":
                    self.counts.usage += usage_of_line(line)
            file.truncate(whole)

    def _is_done(self, custom_id: str) -> bool:
        if not len(self._done):
            return False
        number = np.uint64(number_of(custom_id, self._key))
        at = int(np.searchsorted(self._done, number))
        return at < len(self._done) and bool(self._done[at] == number)

    # What is at work

    async def _next(self, few: deque[Asked], lines: Iterator[bytes]) -> Asked | None:
        """A line to be asked now; None when there is none left."""
        while True:
            if self._rest:
                await asyncio.sleep(self._rest)
            if self._again:
                return self._again.popleft()
            if not few and not self._read_all:
                few.extend(await self._do(partial(self._read_few, lines)))
                self._read_all = not few
            if few:
                return few.popleft()
            if not self._flying and not self._again:
                return None
            if not self._again:
                await self._change()

    def _read_few(self, lines: Iterator[bytes]) -> list[Asked]:
        """Some lines that are not done."""
        found: list[Asked] = []
        size = 0
        for line in lines:
            asked = self._spelling.read(line)
            if self._is_done(asked.custom_id):
                continue
            found.append(asked)
            size += len(line)
            if size >= READ_BYTES:
                break
        return found

    async def _room(self) -> None:
        """Returns when another line may be asked, and not too many wait to be written."""
        while len(self._finished) >= MOST_UNWRITTEN or (
            self._flying and (len(self._flying) >= self._most() or self._flying_bytes >= FLYING_BYTES)
        ):
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _start(self, asked: Asked) -> None:
        task: asyncio.Task[LineReply] = asyncio.create_task(self._asked(asked))
        self._flying[task] = asked
        self._flying_bytes += len(asked.body)
        task.add_done_callback(self._ended)

    async def _asked(self, asked: Asked) -> LineReply:
        task = asyncio.current_task()
        assert task is not None
        behind.set(partial(self._step_back, task))
        return await self._answer(asked)

    def _step_back(self, task: "asyncio.Task[LineReply]") -> None:
        """Somebody needs its place."""
        if not task.done():
            self._pressed.add(task)
            task.cancel()

    def _ended(self, task: "asyncio.Task[LineReply]") -> None:
        asked = self._flying.pop(task)
        self._flying_bytes -= len(asked.body)
        pressed = task in self._pressed
        self._pressed.discard(task)
        self._changed.set()
        if task.cancelled():
            if pressed:
                self._again.append(asked)
            return
        if (error := task.exception()) is not None:
            logger.error("A line of a batch could not be answered", exc_info=error)
            self._again.append(asked)
            self._rest = LONGEST_REST_S
            return
        reply = task.result()
        if reply.status in AGAIN:
            self._again.append(asked)
            self._rest = min(LONGEST_REST_S, max(0.25, 2 * self._rest))
            return
        self._rest = 0.0
        self._finished.append((asked.custom_id, reply))
        self._comes.set()

    # What came of it

    async def _write_always(self) -> None:
        """What comes while something is written is written together."""
        while self._finished or not self._over:
            await self._comes.wait()
            if not self._over:
                await asyncio.sleep(GATHER_S)
                self._comes.clear()
            finished, self._finished = self._finished, []
            try:
                await self._do(partial(self._append, finished))
            except StoreUnavailable:
                logger.exception("What came of a batch could not be written; it is tried again")
                if self._over:
                    # It is not done then, and is asked again by whoever goes on.
                    return
                self._finished = finished + self._finished
                await asyncio.sleep(DISK_REST_S)
                self._comes.set()
            self._changed.set()

    def _append(self, finished: list[tuple[str, LineReply]]) -> None:
        good = [one for one in finished if one[1].status < 400]
        bad = [one for one in finished if one[1].status >= 400]
        for place, some in ((self._good, good), (self._bad, bad)):
            written = [self._spelling.write(new_line_id(), custom_id, reply) for custom_id, reply in some]
            append_lines(place, written, sync=time.monotonic() - self._synced > SYNC_S)
        self._synced = time.monotonic()
        self.counts.completed += len(good)
        self.counts.failed += len(bad)
        for _, reply in good:
            self.counts.usage += usage_in(reply.body)

    def write_undone(self, why: str) -> None:
        """Says of all lines that are not done why they are not. `recover` says which those are."""
        with self._source.open("rb") as source:
            lines = lines_of(source)
            while some := self._read_few(lines):
                ids = (one.custom_id for one in some)
                written = [self._spelling.write_undone(new_line_id(), id_, why) for id_ in ids]
                append_lines(self._bad, written)
                self.counts.undone += len(written)


def new_line_id() -> str:
    return f"batch_req_{os.urandom(16).hex()}"


def append_lines(place: Path, lines: list[bytes], *, sync: bool = False) -> None:
    """All of them or none, where the disk is full."""
    if not lines:
        return
    with place.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            write_all(file, b"".join(lines))
        except OSError:
            file.truncate(before)
            raise
        if sync:
            os.fsync(file.fileno())
