"""Answers a file of requests line by line; results go to an output file and an error file.

Memory holds only the lines that are running: lines are read on demand, and results are written in the order
in which they arrive. After an interruption the run resumes: lines in the two files are done, recognized by a
hash of eight bytes of their `custom_id`. A partially written result is discarded, and its line runs again.

Lines run in the background (`background_cancel` in turns/queue.py). A line is preempted when another request
needs its permit, and runs again later, as after an engine failure or a stop of the server. Any other error
becomes the result of the line.
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

from dragoman.api.batches import BatchLineCodec, LineReply, LineRequest, said_of, usage_in, usage_of_line
from dragoman.errors import StoreUnavailable
from dragoman.store.disk import open_bytes, write_all
from dragoman.turns.queue import background_cancel
from dragoman.types import Usage

logger = logging.getLogger("dragoman.batches")

T = TypeVar("T")
READ_BYTES = 256 * 1024
"""Bytes of lines read at once, unless a single line is longer."""
FLYING_BYTES = 32 * 1024 * 1024
"""Bytes of lines that run at once, unless a single line is longer."""
AGAIN = frozenset({429, 503, 529})
"""Statuses for which the line is retried: the server was at fault, not the line."""
LONGEST_REST_S = 30.0
DISK_REST_S = 2.0
SYNC_S = 1.0
GATHER_S = 0.05
"""Seconds for which results are collected before they are written."""
MOST_UNWRITTEN = 256


class DiskRunner(Protocol):
    """Runs blocking disk work in a thread."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


class LineCounts(Struct):
    completed: int = 0
    failed: int = 0
    undone: int = 0
    """Lines recorded as not run."""
    usage: Usage = field(default_factory=Usage)


def lines_of(source: IO[bytes], longest: int = -1) -> Iterator[bytes]:
    """Yield the lines without line ends, skipping empty ones."""
    while line := source.readline(longest):
        if stripped := line.strip():
            yield stripped


class SeenIds:
    """Detects duplicate ids by a hash of eight bytes each."""

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
    """Hash an id. Without the key, clients cannot construct a collision."""
    digest = blake2b(custom_id.encode(errors="surrogatepass"), digest_size=8, key=key)
    return int.from_bytes(digest.digest())


class LineProcessor:
    """Answers all lines of a file: `await LineProcessor(source, good, bad, ...).run()`.

    Successful results go to `good`, others to `bad`; both may be one file. `most()` lines run at once.
    """

    def __init__(
        self,
        source: Path,
        output: Path,
        errors: Path,
        spelling: BatchLineCodec,
        answer: Callable[[LineRequest], Awaitable[LineReply]],
        most: Callable[[], int],
        do: DiskRunner,
    ) -> None:
        self.counts = LineCounts()
        self._source, self._good, self._bad = source, output, errors
        self._spelling = spelling
        self._answer = answer
        self._most = most
        self._do = do
        self._key = os.urandom(16)
        self._done: np.ndarray[tuple[int], np.dtype[np.uint64]] = np.zeros(0, np.uint64)
        """Sorted hashes of the lines that were done before."""
        self._in_flight: dict[asyncio.Task[LineReply], LineRequest] = {}
        self._flying_bytes = 0
        self._again: deque[LineRequest] = deque()
        self._pressed: set[asyncio.Task[LineReply]] = set()
        self._finished: list[tuple[str, LineReply]] = []
        self._changed = asyncio.Event()
        self._comes = asyncio.Event()
        """Set when there are results to write, or there will be no more."""
        self._over = False
        self._read_all = False
        self._rest = 0.0
        """Seconds to wait before the next line, after a line that could not be answered at all."""
        self._synced = 0.0

    async def run(self) -> None:
        await self._do(self.recover)
        writing = asyncio.create_task(self._write_always())
        try:
            with await self._do(partial(open_bytes, self._source)) as source:
                lines = lines_of(source)
                few: deque[LineRequest] = deque()
                while (asked := await self._next(few, lines)) is not None:
                    await self._room()
                    self._start(asked)
                    # One at a time: planning a hundred at once would delay all other requests.
                    await asyncio.sleep(0)
        finally:
            for task in self._in_flight:
                task.cancel()
            await asyncio.gather(*self._in_flight, return_exceptions=True)
            self._over = True
            self._comes.set()
            await writing

    # Results of an earlier run.

    def recover(self) -> None:
        """Read the finished lines from the result files, and truncate a partially written one."""
        self.counts = LineCounts()
        result = array("Q")
        for path in dict.fromkeys((self._good, self._bad)):
            if path.exists():
                self._recover(path, result)
        self._done = np.sort(np.frombuffer(result, np.uint64)) if result else np.zeros(0, np.uint64)

    def _recover(self, path: Path, result: "array[int]") -> None:
        whole = 0
        with path.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                result.append(number_of(said_of(line), self._key))
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

    # Running lines.

    async def _next(self, few: deque[LineRequest], lines: Iterator[bytes]) -> LineRequest | None:
        """Return the next line to run; None when all are done."""
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
            if not self._in_flight and not self._again:
                return None
            if not self._again:
                await self._change()

    def _read_few(self, lines: Iterator[bytes]) -> list[LineRequest]:
        """Read some lines that are not done."""
        items: list[LineRequest] = []
        size = 0
        for line in lines:
            asked = self._spelling.read(line)
            if self._is_done(asked.custom_id):
                continue
            items.append(asked)
            size += len(line)
            if size >= READ_BYTES:
                break
        return items

    async def _room(self) -> None:
        """Wait until another line may start, and not too many results wait to be written."""
        while len(self._finished) >= MOST_UNWRITTEN or (
            self._in_flight and (len(self._in_flight) >= self._most() or self._flying_bytes >= FLYING_BYTES)
        ):
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _start(self, asked: LineRequest) -> None:
        task: asyncio.Task[LineReply] = asyncio.create_task(self._answer_line(asked))
        self._in_flight[task] = asked
        self._flying_bytes += len(asked.body)
        task.add_done_callback(self._ended)

    async def _answer_line(self, asked: LineRequest) -> LineReply:
        task = asyncio.current_task()
        assert task is not None
        background_cancel.set(partial(self._step_back, task))
        return await self._answer(asked)

    def _step_back(self, task: "asyncio.Task[LineReply]") -> None:
        """Preempt the line: another request needs its permit."""
        if not task.done():
            self._pressed.add(task)
            task.cancel()

    def _ended(self, task: "asyncio.Task[LineReply]") -> None:
        asked = self._in_flight.pop(task)
        self._flying_bytes -= len(asked.body)
        pressed = task in self._pressed
        self._pressed.discard(task)
        self._changed.set()
        if task.cancelled():
            if pressed:
                self._again.append(asked)
            return
        if (error := task.exception()) is not None:
            logger.error("Answering a line of a batch failed", exc_info=error)
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

    # Results.

    async def _write_always(self) -> None:
        """Write results until the run ends; those that arrive during a write are written together."""
        while self._finished or not self._over:
            await self._comes.wait()
            if not self._over:
                await asyncio.sleep(GATHER_S)
                self._comes.clear()
            finished, self._finished = self._finished, []
            try:
                await self._do(partial(self._append, finished))
            except StoreUnavailable:
                logger.exception("Results of a batch could not be written; retrying")
                if self._over:
                    # The results are dropped, and their lines run again when the batch resumes.
                    return
                self._finished = finished + self._finished
                await asyncio.sleep(DISK_REST_S)
                self._comes.set()
            self._changed.set()

    def _append(self, finished: list[tuple[str, LineReply]]) -> None:
        good = [one for one in finished if one[1].status < 400]
        bad = [one for one in finished if one[1].status >= 400]
        for path, some in ((self._good, good), (self._bad, bad)):
            written = [self._spelling.write(new_line_id(), custom_id, reply) for custom_id, reply in some]
            append_lines(path, written, sync=time.monotonic() - self._synced > SYNC_S)
        self._synced = time.monotonic()
        self.counts.completed += len(good)
        self.counts.failed += len(bad)
        for _, reply in good:
            self.counts.usage += usage_in(reply.body)

    def write_undone(self, why: str) -> None:
        """Record for each line that is not done why it was not run. `recover` determines which these are."""
        with self._source.open("rb") as source:
            lines = lines_of(source)
            while some := self._read_few(lines):
                ids = (one.custom_id for one in some)
                written = [self._spelling.write_undone(new_line_id(), id_, why) for id_ in ids]
                append_lines(self._bad, written)
                self.counts.undone += len(written)


def new_line_id() -> str:
    return f"batch_req_{os.urandom(16).hex()}"


def append_lines(path: Path, lines: list[bytes], *, sync: bool = False) -> None:
    """Append all lines, or none if the disk is full."""
    if not lines:
        return
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            write_all(file, b"".join(lines))
        except OSError:
            file.truncate(before)
            raise
        if sync:
            os.fsync(file.fileno())
