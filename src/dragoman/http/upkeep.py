"""Keeps the server process healthy: returns free memory to the system, schedules garbage collection, and
reports a blocked event loop.

Python looks for unreachable cycles whenever enough objects were created, and from time to time among all
objects, while all threads wait. The objects that exist at the start alone take 30 ms, and parsing a large
request, which creates objects faster than anything else, triggers it again and again. The objects of the
start are therefore frozen, and full collections run only in quiet moments. The youngest objects are collected
when they are as many as two hundred requests create: during most bursts there is no collection.
"""

import asyncio
import ctypes
import gc
import logging
import math
import resource
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("dragoman.http")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
BIG_BLOCK = 1024 * 1024
ARENAS = 2
NEVER = 2**31 - 1
YOUNG = 50_000
"""New surviving objects before Python collects the youngest generation, which takes some milliseconds."""
LOOKS = 2
"""Collections of the youngest generation before a full one is worthwhile in a quiet moment."""
PAUSE_S = 10.0
"""Seconds between full collections."""
LATEST_S = 120.0
"""Seconds after which a full collection runs even under load, if memory has grown by `GROWN_BYTES`:"""
GROWN_BYTES = 256 * 1024 * 1024
GIVE_BACK_S = 10.0
"""Seconds between two returns of memory."""
SPARE_BYTES = 8 * 1024 * 1024
"""Growth since the last return that makes another worthwhile. This much is also kept: the next burst would
otherwise have the system clear it again."""


def keep_less() -> None:
    """Have the C library return each large block at once, and keep few arenas for small ones.

    glibc returns large blocks only until the first was freed; after that it keeps blocks of that size for
    reuse, in every thread: a few requests of 16 MB leave a server with 100 MB that it never uses again. It
    also has eight arenas per core, which grow with the largest request.

    An existing arena stays, so this must run before an engine creates threads.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # Another C library, with its own settings.
    wanted = {M_MMAP_THRESHOLD: BIG_BLOCK, M_ARENA_MAX: ARENAS, M_TRIM_THRESHOLD: SPARE_BYTES}
    if not all(mallopt(name, value) for name, value in wanted.items()):
        logger.debug("The C library did not accept the memory settings")


def give_back() -> None:
    """Have the C library return free memory within its arenas. It takes milliseconds: do not call it on the
    event loop.

    Each thread has its own arena for small blocks, and blocks freed there stay with the process.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Return the resident memory in bytes, or its maximum where the system reports only that."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class GcController:
    """Schedules garbage collection: from `begin` to `end`, only `collect` runs full collections."""

    def __init__(self) -> None:
        self._usual: tuple[int, int, int] | None = None
        self._last = 0.0
        self._resident = 0

    def begin(self) -> None:
        """Freeze the existing objects, which stay as long as the server."""
        self._usual = gc.get_threshold()
        gc.set_threshold(YOUNG, NEVER, NEVER)
        gc.collect()
        gc.freeze()
        self._looked()

    def renew(self) -> None:
        """Collect and freeze again after something large from the start was removed. Do not call it on the
        event loop."""
        if self._usual is not None:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            self._looked()

    def end(self) -> None:
        if self._usual is not None:
            gc.set_threshold(*self._usual)
            gc.unfreeze()
            self._usual = None

    def collect(self, *, quiet: bool) -> None:
        """Run a full collection if it is due; `quiet` means that no large request, with many objects, is
        active."""
        if self._usual is None:
            return
        passed = time.monotonic() - self._last
        # About as often as Python would by its own thresholds.
        due = quiet and passed > PAUSE_S and gc.get_count()[1] > LOOKS
        if due or (passed > LATEST_S and resident() - self._resident >= GROWN_BYTES):
            gc.collect()
            self._looked()

    def _looked(self) -> None:
        self._last, self._resident = time.monotonic(), resident()


class MemoryTrimmer:
    """Returns free memory to the system from time to time, if memory has grown since the last time."""

    def __init__(self) -> None:
        self._last = -math.inf
        self._least = 0

    async def give_back(self) -> bool:
        """Return whether memory was returned."""
        now, here = time.monotonic(), resident()
        self._least = min(self._least, here)
        if now - self._last < GIVE_BACK_S or here - self._least < SPARE_BYTES:
            return False
        self._last = now
        await asyncio.to_thread(give_back)
        self._least = resident()
        return True


# Logs when the event loop is blocked, and where.
#
# An engine that computes in `generate` without awaiting blocks all requests, and nothing on the loop can
# report it. A thread therefore sends the loop a callback, and reads the loop's stack if the callback does not
# run in time.


LONGEST_S = 1.0
GRACE_S = 0.2
"""Seconds for the loop to run after a pause of the whole process."""
PLACES = 3


class StallWatch:
    """Watches the event loop on which it is created and closed."""

    def __init__(self, longest: float | None = None) -> None:
        self._longest = LONGEST_S if longest is None else longest
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._over = threading.Event()
        threading.Thread(target=self._run, name="dragoman-stall", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._longest):
            moved = threading.Event()
            with suppress(RuntimeError):
                # A closed loop has ended and is not blocked.
                self._loop.call_soon_threadsafe(moved.set)
                if not moved.wait(self._longest) and not moved.wait(GRACE_S):
                    self._tell()
                    while not moved.wait(self._longest) and not self._over.is_set():
                        pass

    def _tell(self) -> None:
        frame = sys._current_frames().get(self._ident)
        positions = traceback.extract_stack(frame)[-PLACES:] if frame is not None else []
        where = ", ".join(
            f"{position.filename}:{position.lineno} in {position.name}" for position in reversed(positions)
        )
        logger.warning("Event loop blocked for %.0f s, all requests stalled: %s",
                       self._longest, where)  # fmt: skip
