"""What a store has on disk beside its database: signs of the servers that use it, and room kept back."""

import contextlib
import os
from contextlib import suppress
from pathlib import Path

from dragoman.errors import StoreUnavailable

try:
    import fcntl
except ImportError:  # Windows: then there is only one server to a folder
    fcntl = None  # type: ignore[assignment]


# Which servers of a folder are alive: each holds a lock on a file of its own, and the lock ends with it.


PREFIX = ".server-"


class Presence:
    """`Presence(folder, "a")` is seen by others as alive until `leave`, or until the process ends."""

    def __init__(self, folder: Path, instance: str) -> None:
        self._folder = folder
        self._path = self._file(instance)
        try:
            self._lock = self._locked(folder / f".{instance}")
        except OSError as error:
            raise StoreUnavailable(
                f"No file can be locked in {folder}: {error.strerror}. Choose another data_dir."
            ) from error
        for left in folder.glob(f"{PREFIX}*"):
            self.is_alive(left.name.removeprefix(PREFIX))

    def _locked(self, unnamed: Path) -> int:
        """Locked before it has its name, so that nobody ever sees it without the lock."""
        lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        unnamed.rename(self._path)
        return lock

    def leave(self) -> None:
        if self._lock >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def is_alive(self, instance: str) -> bool:
        """Whether a server of this name lives. The file of one that does not is cleared away."""
        path = self._file(instance)
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return False

    def _file(self, instance: str) -> Path:
        return self._folder / f"{PREFIX}{instance}"


# Room that is kept back on the disk of a database, so that something can be deleted when the disk is full.
#
# To delete is to write first: the log of changes grows before anything becomes free.


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
