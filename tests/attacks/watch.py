"""Where a server was while its event loop stood still: stacks, taken by a thread beside it.

A call into C that keeps the interpreter to itself stops this thread too. It goes on as soon as the call is
over, and finds its caller at the line of the call, so that the time is put down to the right one.
"""

import gc
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

LATE_S = 0.02
"""A loop that is later than this is looked at."""
LOOK_EVERY_S = 0.004
HELD_S = 0.015
"""A thread that wanted to wake up and could not for so long was kept from the interpreter."""
_FRAMES = 6


class Watch:
    """`beat` is called by the loop at every turn; `told` says where it was when it was late."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seen: dict[str, float] = {}
        """The longest time in one place without a look between."""
        self._collecting = 0.0
        self._loop = threading.get_ident()
        gc.callbacks.append(self._collected)
        threading.Thread(target=self._look, daemon=True, name="watch").start()

    def beat(self) -> None:
        self._last = time.perf_counter()

    def told(self) -> str:
        """`120 ms loop: msgspec ...; 30 ms held by Thread-3: ...`, the longest first. Then it begins anew."""
        seen, self._seen = self._seen, {}
        longest = sorted(seen.items(), key=lambda one: -one[1])[:3]
        return "; ".join(f"{1000 * took:.0f} ms {where}" for where, took in longest)

    def _look(self) -> None:
        before = time.perf_counter()
        while True:
            time.sleep(LOOK_EVERY_S)
            now = time.perf_counter()
            gap, before = now - before, now
            if now - self._last > LATE_S:
                self._note(gap)

    def _note(self, gap: float) -> None:
        """Whoever had the interpreter; the loop itself if it was busy with something of its own."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = {id_: frame for id_, frame in sys._current_frames().items() if names.get(id_) != "watch"}
        where = f"loop: {stack(frames[self._loop])}"
        if gap > HELD_S:
            others = [
                f"{names.get(id_)}: {stack(frame)}"
                for id_, frame in frames.items()
                if id_ != self._loop and not _waits(frame)
            ]
            where = " | ".join([where, *others])
        self._seen[where] = max(self._seen.get(where, 0.0), gap)

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._collecting = time.perf_counter()
        elif (took := time.perf_counter() - self._collecting) > 0.01:
            where = f"garbage collection of generation {info['generation']}"
            self._seen[where] = max(self._seen.get(where, 0.0), took)


def stack(frame: FrameType | None) -> str:
    """`json.py:9 decode < read.py:49 read < app.py:40 http`: the innermost, and those of the package."""
    texts: list[str] = []
    while frame is not None and len(texts) < _FRAMES:
        code = frame.f_code
        if not texts or f"{os.sep}dragoman{os.sep}" in code.co_filename:
            texts.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(texts)


def _waits(frame: FrameType) -> bool:
    return frame.f_code.co_name in ("wait", "_worker", "get", "select", "_waiting", "_recv", "accept")
