"""Cycles of objects that nobody needs any more, looked for when it costs the others nothing.

Python looks for them whenever enough objects have been made, and now and then among all that there are, while
all threads wait. Those of the start alone are 30 ms, and while a large request is read, which makes objects
faster than anything else, it happens again and again. So the objects of the start are not looked at any more,
and all others only in quiet moments; those that were made last, which are few, are looked at as ever.
"""

import gc
import math
import time

from dragoman.http.connection.memory import resident

NEVER = 2**31 - 1
PAUSE_S = 10.0
"""Between two looks at everything."""
LATEST_S = 120.0
"""After so long, however busy it is, if there is so much more memory than after the last look:"""
GROWN_BYTES = 256 * 1024 * 1024
GIVE_BACK_S = 60.0


class Garbage:
    """From `begin` to `end` full collections are made by `collect` alone."""

    def __init__(self) -> None:
        self._usual: tuple[int, int, int] | None = None
        self._last = 0.0
        self._given_back = -math.inf
        self._resident = 0

    def begin(self) -> None:
        """What there is by now stays for as long as the server does."""
        self._usual = gc.get_threshold()
        gc.set_threshold(*self._usual[:2], NEVER)
        gc.collect()
        gc.freeze()
        self._looked()

    def end(self) -> None:
        if self._usual is not None:
            gc.set_threshold(*self._usual)
            gc.unfreeze()
            self._usual = None

    def collect(self, *, quiet: bool) -> bool:
        """`quiet` says that no large request is there, whose objects would be looked at, too.

        True once in a while, after a look: then there may be memory to give back.
        """
        if self._usual is None:
            return False
        passed = time.monotonic() - self._last
        # As often as Python would, by the third of its thresholds, or later.
        due = quiet and passed > PAUSE_S and gc.get_count()[2] > self._usual[2]
        if due or (passed > LATEST_S and resident() - self._resident >= GROWN_BYTES):
            gc.collect()
            self._looked()
            if self._last - self._given_back > GIVE_BACK_S:
                self._given_back = self._last
                return True
        return False

    def _looked(self) -> None:
        self._last, self._resident = time.monotonic(), resident()
