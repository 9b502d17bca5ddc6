"""A SQLite database: how it is opened, brought up to date, and what its errors mean."""

import contextlib
import os
import sqlite3
from pathlib import Path

from dragoman.errors import StoreUnavailable
from dragoman.store.migrations import SQLITE, VERSION, steps

LEAST = (3, 35, 0)
"""The first with RETURNING."""
WAL_BYTES = 16 * 1024 * 1024
"""What the log of the last writes is cut back to after it was copied into the database."""

# By the names of SQLite's primary error codes.
TROUBLES = {
    "SQLITE_FULL": "{where} has no room left: make some on its disk.",
    "SQLITE_READONLY": "{where} cannot be written: check its permissions and those of its folder.",
    "SQLITE_PERM": "{where} cannot be written: check its permissions and those of its folder.",
    "SQLITE_CANTOPEN": "{where} cannot be opened: check that its folder is there and can be written.",
    "SQLITE_BUSY": "{where} is locked by another process for too long: end that, or try again.",
    "SQLITE_LOCKED": "{where} is locked by another process for too long: end that, or try again.",
    "SQLITE_NOTADB": "{where} is not a database of dragoman: move it away, or choose another data_dir.",
    "SQLITE_CORRUPT": "{where} is damaged: restore it from a backup, or move it away to begin anew.",
    "SQLITE_IOERR": "{where} cannot be read or written: its disk reports an error.",
}


def is_full(error: Exception) -> bool:
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorname", None) == "SQLITE_FULL"


def unavailable(error: sqlite3.Error, where: str) -> StoreUnavailable:
    name = getattr(error, "sqlite_errorname", None) or ""
    # An extended code, like SQLITE_IOERR_FSYNC, begins with its primary one.
    primary = "_".join(name.split("_")[:2])
    text = TROUBLES.get(primary, "{where} could not do what was asked; the log says more.")
    return StoreUnavailable(text.format(where=where))


def prepare(path: Path) -> None:
    """Makes the file, for its owner alone: what SQLite makes itself can be read by others.

    A file that is there is not even opened: to close it again would end the locks that other connections of
    this process have on it.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise StoreUnavailable(
            f"The database {path} cannot be made or opened: {error.strerror}. Choose another data_dir."
        ) from error


def connect(path: Path | None, busy_s: float) -> sqlite3.Connection:
    """A connection for the thread that asks. Transactions are begun and ended by hand."""
    if sqlite3.sqlite_version_info < LEAST:
        raise StoreUnavailable(f"SQLite is {sqlite3.sqlite_version}; the store needs 3.35 or newer.")
    connection = sqlite3.connect(path or ":memory:", timeout=busy_s, isolation_level=None)
    connection.execute("PRAGMA foreign_keys = ON")
    # What was acknowledged is there after a loss of power, too.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
    return connection


def migrate(connection: sqlite3.Connection, where: str) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        _migrate(connection, where)
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _migrate(connection: sqlite3.Connection, where: str) -> None:
    version = version_of(connection)
    if version > VERSION:
        raise StoreUnavailable(
            f"{where} was written by a newer dragoman (its tables have version {version}, this one knows"
            f" {VERSION}): update dragoman, or choose another data_dir."
        )
    if version == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise StoreUnavailable(TROUBLES["SQLITE_NOTADB"].format(where=where))
    for sql in steps(version, SQLITE):
        connection.execute(sql)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def version_of(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version
