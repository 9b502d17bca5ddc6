"""What the native library says while it works: kept short, shown only when something failed."""

import ctypes
import logging
from collections import deque
from typing import Any

_WARN, _ERROR, _CONTINUED = 3, 4, 5
_log = logging.getLogger("dragoman.llamacpp")

Callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
passing_on = False


def callback(errors: deque[str]) -> Any:
    """A C callback that keeps the last warnings and errors in `errors`; the caller keeps it alive."""

    def receive(level: int, text: bytes | None, _user: Any) -> None:
        line = (text or b"").decode(errors="replace").rstrip()
        if not line:
            return
        if level in (_WARN, _ERROR):
            errors.append(line)
        if passing_on:
            _log.log(logging.WARNING if level in (_WARN, _ERROR) else logging.INFO, "%s", line)

    return Callback(receive)
