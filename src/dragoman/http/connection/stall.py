"""Says in the log when the event loop stands still, and where it does.

An engine that computes in `generate` without awaiting holds up everybody, and nothing on the loop can tell.
So a thread of its own asks the loop for a sign, and looks at its stack where there is none.
"""

import asyncio
import logging
import sys
import threading
import traceback
from contextlib import suppress

logger = logging.getLogger("dragoman.http")

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
