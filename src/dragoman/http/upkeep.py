"""The process of a server kept fit: memory goes back to the machine, and a loop that stands still is told.

About cycles of objects that nobody needs: Python looks for these whenever enough objects have been made,
and now and then among all there are, while all threads wait. Those of the start alone are 30 ms, and while
a large request is read, which makes objects faster than anything else, it happens again and again. So the
objects of the start are not looked at any more, and all others only in quiet moments; those that were made
last are looked at once, when they are as many as two hundred requests have: in most bursts nobody looks.
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
"""Objects that are made, and stay, before Python looks at them, which takes some milliseconds."""
LOOKS = 2
"""At those, before it is worth to look at everything in a quiet moment."""
PAUSE_S = 10.0
"""Between two looks at everything."""
LATEST_S = 120.0
"""After so long, however busy it is, if there is so much more memory than after the last look:"""
GROWN_BYTES = 256 * 1024 * 1024
GIVE_BACK_S = 10.0
"""Between two times that memory is given back."""
SPARE_BYTES = 8 * 1024 * 1024
"""More than that after the last time, and it is worth another. So much is not given back at once, either: the
next burst of requests would have the system clear it again."""


def keep_less() -> None:
    """Has the C library give every big block back at once, and keep few places for small ones.

    glibc gives big ones back only until the first one was freed; from then on it keeps blocks of that size
    for the next, in every thread: some requests of 16 MB and a server has 100 MB that it never uses again.
    And it has eight places (arenas) for each core, which grow with the largest request that came.
    One that is there stays: so this comes before the threads of an engine do.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # Another C library, with ways of its own.
    wanted = {M_MMAP_THRESHOLD: BIG_BLOCK, M_ARENA_MAX: ARENAS, M_TRIM_THRESHOLD: SPARE_BYTES}
    if not all(mallopt(name, value) for name, value in wanted.items()):
        logger.debug("The C library keeps its way with memory.")


def give_back() -> None:
    """Has the C library return what is free between what is not. It takes milliseconds: not on the loop.

    Each thread has places of its own for small blocks, and what was freed in them stays with the process.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Bytes of memory that the process has, or the most it ever had where the system says only that."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Garbage:
    """From `begin` to `end` full collections are made by `collect` alone."""

    def __init__(self) -> None:
        self._usual: tuple[int, int, int] | None = None
        self._last = 0.0
        self._resident = 0

    def begin(self) -> None:
        """What there is by now stays for as long as the server does."""
        self._usual = gc.get_threshold()
        gc.set_threshold(YOUNG, NEVER, NEVER)
        gc.collect()
        gc.freeze()
        self._looked()

    def renew(self) -> None:
        """Something large that was there at the start has gone. Not for the event loop."""
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
        """`quiet` says that no large request is there, whose objects would be looked at, too."""
        if self._usual is None:
            return
        passed = time.monotonic() - self._last
        # Hardly less often than Python would, by its thresholds.
        due = quiet and passed > PAUSE_S and gc.get_count()[1] > LOOKS
        if due or (passed > LATEST_S and resident() - self._resident >= GROWN_BYTES):
            gc.collect()
            self._looked()

    def _looked(self) -> None:
        self._last, self._resident = time.monotonic(), resident()


class SpareMemory:
    """Goes back to the machine now and then, where there is more than after the last time."""

    def __init__(self) -> None:
        self._last = -math.inf
        self._least = 0

    async def give_back(self) -> bool:
        """Whether it was tried."""
        now, here = time.monotonic(), resident()
        self._least = min(self._least, here)
        if now - self._last < GIVE_BACK_S or here - self._least < SPARE_BYTES:
            return False
        self._last = now
        await asyncio.to_thread(give_back)
        self._least = resident()
        return True


# Says in the log when the event loop stands still, and where it does.
#
# An engine that computes in `generate` without awaiting holds up everybody, and nothing on the loop can
# tell. So a thread of its own asks the loop for a sign, and looks at its stack where there is none.


LONGEST_S = 1.0
GRACE_S = 0.2
"""After a pause of the whole process the loop comes to its turn within this time."""
PLACES = 3


class StallWatch:
    """Made and closed on the event loop that it watches."""

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
                # A loop that is closed does not stand still: it has ended.
                self._loop.call_soon_threadsafe(moved.set)
                if not moved.wait(self._longest) and not moved.wait(GRACE_S):
                    self._tell()
                    while not moved.wait(self._longest) and not self._over.is_set():
                        pass

    def _tell(self) -> None:
        frame = sys._current_frames().get(self._ident)
        places = traceback.extract_stack(frame)[-PLACES:] if frame is not None else []
        where = ", ".join(f"{place.filename}:{place.lineno} in {place.name}" for place in reversed(places))
        logger.warning("The event loop has stood still for %.0f s, and with it all requests: %s",
                       self._longest, where)  # fmt: skip
