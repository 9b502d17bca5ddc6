"""Whether a step that is being computed gets on, and how to break it off."""

import ctypes
import sys
from typing import Protocol, runtime_checkable

from dragoman.engines.local.binding import Library

_MANY = 2**31 - 1
_ROOM = 128
"""Bytes of a `sem_t`, and more: its size depends on the machine."""


@runtime_checkable
class Pulsing(Protocol):
    """A runner of which can be seen from outside whether a step gets on."""

    @property
    def pulse(self) -> int:
        """A number that changes while a step is computed. From any thread."""


class Beat:
    """Attached to a context of llama.cpp, which asks a C function after each operation whether to go on.

    A Python function would wait for the interpreter lock each time, so it is one of C's own that takes a
    pointer: `sem_trywait` takes one off a semaphore and says 0, for "go on", until there is none left. So
    what is left tells how far the step is, and with nothing left the step ends.
    """

    def __init__(self, library: Library, context: int) -> None:
        self._libc = ctypes.CDLL(None)
        self._memory = ctypes.create_string_buffer(_ROOM)
        self._left = ctypes.c_int(0)
        # Elsewhere there may be no semaphores without a name. `strlen` is 0 or 1 as well, but does not count.
        self._counts = sys.platform == "linux"
        ask = self._libc.sem_trywait if self._counts else self._libc.strlen
        self.reset()
        library.set_abort_callback(context, ctypes.cast(ask, ctypes.c_void_p), ctypes.addressof(self._memory))

    def reset(self) -> None:
        """A new step begins."""
        self._set(_MANY)

    def stop(self) -> None:
        """From any thread: break off the step that is running, if one is."""
        self._set(0)

    @property
    def count(self) -> int:
        """Operations of this step, as far as anyone can tell. From any thread."""
        if not self._counts:
            return 0
        self._libc.sem_getvalue(self._memory, ctypes.byref(self._left))
        return _MANY - self._left.value

    def _set(self, value: int) -> None:
        if self._counts:
            self._libc.sem_init(self._memory, 0, value)
        else:
            self._memory[0] = b"\0" if value else b"\1"
