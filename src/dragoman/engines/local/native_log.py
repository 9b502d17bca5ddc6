"""What the native library says while it works.

It goes to the logger `dragoman.llamacpp` at DEBUG, so nobody sees it who has not asked; the last warnings
and errors are kept, to say why something failed.
"""

import ctypes
import logging
from collections import deque
from typing import Any

_WARN, _ERROR = 3, 4
_log = logging.getLogger("dragoman.llamacpp")

Callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def callback(errors: deque[str]) -> Any:
    """A C callback that keeps the last warnings and errors in `errors`; the caller keeps it alive."""

    def receive(level: int, text: bytes | None, _user: Any) -> None:
        line = (text or b"").decode(errors="replace").rstrip()
        if line and level in (_WARN, _ERROR):
            errors.append(line)
        if line:
            _log.debug("%s", line)

    return Callback(receive)
