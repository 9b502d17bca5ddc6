"""The stack on which signals of a thread are handled, kept out of OpenVINO's hands.

The plugin for CPUs, when it is made, gives the thread that makes it a signal stack of the plugin's own. When
it goes, it unmaps that memory, and takes the stack back from the thread on which that happens: if another
thread lets go of the graph, as in a server that stops, the first is left with a stack that is not there.
Python handles signals on such a stack where there is one, so the next signal would be the process's end: by
SIGSEGV, and not by what the signal was to do. So what a thread had is put back once the plugin is made.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_DISABLED = 2


class _Stack(ctypes.Structure):
    """stack_t, as it is on Linux."""

    _fields_ = (("place", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def signal_stack_kept() -> Iterator[None]:
    """After the block this thread handles signals where it did before, whatever the block has set."""
    if sys.platform != "linux":
        # Nobody sets one elsewhere.
        yield
        return
    libc, before = ctypes.CDLL(None), _Stack()
    libc.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        if not before.place:
            before.flags = _DISABLED
        libc.sigaltstack(ctypes.byref(before), None)


def signal_stack() -> int | None:
    """Where this thread handles signals; None: on the stack on which it works."""
    found = _Stack()
    if sys.platform == "linux":
        ctypes.CDLL(None).sigaltstack(None, ctypes.byref(found))
    place: int | None = found.place
    return place
