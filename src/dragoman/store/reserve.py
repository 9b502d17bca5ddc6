"""Room that is kept back on the disk of a database, so that something can be deleted when the disk is full.

To delete is to write first: the log of changes grows before anything becomes free.
"""

import os
from contextlib import suppress
from pathlib import Path

BYTES = 4 * 1024 * 1024


class Reserve:
    """A file beside the database, which is there while there is room for it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self) -> None:
        """Takes the room, if there is any. Servers that share the folder share the file."""
        with suppress(OSError):
            if self._path.stat().st_size == BYTES:
                return
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                _fill(file)
            finally:
                os.close(file)
        except OSError:
            self.give()

    def give(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def _fill(file: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, BYTES)
    else:
        os.write(file, bytes(BYTES))
