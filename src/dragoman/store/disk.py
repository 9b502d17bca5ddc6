"""Files beside a database: locks of living servers, a disk reserve, and named objects in folders."""

import contextlib
import errno
import os
import re
import tempfile
import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
from msgspec import Struct

from dragoman.errors import StoreUnavailable, UnknownCursor

try:
    import fcntl
except ImportError:  # Windows: then there is only one server to a folder
    fcntl = None  # type: ignore[assignment]


# Which servers that share a folder are alive: each holds a lock on its own file, which ends with its process.


PREFIX = ".server-"


class LivenessLock:
    """The lock file of a living server: other servers see it as alive until `leave`, or until the process
    ends.
    """

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
        """Lock the file before it gets its name, so that no server ever sees it unlocked."""
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
        """Whether the server of this name is alive. The file of a dead one is deleted."""
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


def take_lock(path: Path) -> int | None:
    """Lock a file until the process ends; None if another process holds the lock, or the folder is
    missing.
    """
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    try:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


# A disk reserve, which lets records be deleted when the disk is full.
#
# Deleting needs disk space first: the write-ahead log grows before anything becomes free.


BYTES = 4 * 1024 * 1024


class DiskReserve:
    """A spare file beside the database, present while there is space for it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self) -> None:
        """Allocate the file, if there is space. Servers that share the folder share it."""
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


# Objects in a folder: the bytes under a name, and metadata beside them.


S = TypeVar("S", bound=Struct)
NEW, METADATA_SUFFIX = ".new-", ".json"
"""Prefix of names that are being written, and suffix of metadata."""
_ID = re.compile(r"[a-z]+[-_][0-9a-f]{32}")
_last = 0
_naming = threading.Lock()


def new_name(prefix: str, now: float) -> str:
    """Return a name that cannot be guessed and sorts after all names this process made before."""
    global _last
    with _naming:
        _last = max(int(now * 1000), _last + 1)
        return f"{prefix}{_last:012x}{os.urandom(10).hex()}"


def is_name(text: str, prefix: str) -> bool:
    """Whether the text has the format of a generated name."""
    return text.startswith(prefix) and _ID.fullmatch(text) is not None


def names_after(folder: Path, prefix: str, after: str | None, descending: bool) -> Iterator[str]:
    """Yield the names with metadata, in order. Raises UnknownCursor if `after` is not one of them."""
    names = sorted(
        name.removesuffix(METADATA_SUFFIX)
        for name in os.listdir(folder)
        if name.startswith(prefix) and name.endswith(METADATA_SUFFIX)
    )
    if after is None:
        return iter(names[::-1] if descending else names)
    offset = bisect_left(names, after)
    if names[offset : offset + 1] != [after]:
        raise UnknownCursor(after[:128])
    return iter(names[:offset][::-1] if descending else names[offset + 1 :])


def read_metadata(folder: Path, name: str, kind: type[S]) -> S | None:
    """Read metadata; None if there is none of this name, or it cannot be decoded. `name` may be any text."""
    if not _ID.fullmatch(name):
        return None
    try:
        return msgspec.json.decode((folder / f"{name}{METADATA_SUFFIX}").read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def write_metadata(folder: Path, name: str, result: Any) -> None:
    """Write metadata atomically, synced to disk when this returns."""
    number, text = tempfile.mkstemp(prefix=NEW, dir=folder)
    try:
        with os.fdopen(number, "wb", buffering=0) as file:
            write_all(file, msgspec.json.encode(result))
            os.fsync(file.fileno())
        os.replace(text, folder / f"{name}{METADATA_SUFFIX}")
    except BaseException:
        with suppress(OSError):
            os.unlink(text)
        raise
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it survive a power failure."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def open_bytes(path: Path) -> IO[bytes]:
    return path.open("rb")


def write_all(file: IO[bytes], data: bytes | bytearray) -> None:
    """Write all bytes; an unbuffered file may accept fewer than it is given."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def explain_trouble(error: OSError) -> StoreUnavailable:
    """Translate an OSError without the path of the folder, which clients must not see."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreUnavailable("The disk of the files is full; free some space.")
    return StoreUnavailable("The folder of the files cannot be read or written; see the server's log.")
