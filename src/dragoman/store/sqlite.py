"""The store in a file or in memory: SQLite with one writer thread and one reader thread."""

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import Struct

from dragoman.errors import StoreUnavailable
from dragoman.store import store
from dragoman.store.disk import DiskReserve, LivenessLock
from dragoman.store.records import (
    SQLITE,
    VERSION,
    Record,
    Row,
    SqlBatch,
    SqlOperation,
    Statement,
    Stats,
    StoreLimits,
    steps,
)
from dragoman.store.store import Store

# The database: opening, migration, translation of errors.


LEAST = (3, 35, 0)
"""The first version with RETURNING."""
WAL_BYTES = 16 * 1024 * 1024
"""The size that the write-ahead log is truncated to after a checkpoint."""

# By SQLite's primary error codes.
TROUBLES = {
    "SQLITE_FULL": "{where} has no room left: free some space on its disk.",
    "SQLITE_READONLY": "{where} cannot be written: check its permissions and those of its folder.",
    "SQLITE_PERM": "{where} cannot be written: check its permissions and those of its folder.",
    "SQLITE_CANTOPEN": "{where} cannot be opened: check that its folder exists and is writable.",
    "SQLITE_BUSY": ("{where} is locked by another process for too long: end that process, or retry."),
    "SQLITE_LOCKED": ("{where} is locked by another process for too long: end that process, or retry."),
    "SQLITE_NOTADB": "{where} is not a database of dragoman: move it away, or choose another data_dir.",
    "SQLITE_CORRUPT": (
        "{where} is damaged: restore it from a backup, or move it away to start with an empty one."
    ),
    "SQLITE_IOERR": "{where} cannot be read or written: its disk reports an error.",
}


def is_full(error: Exception) -> bool:
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorname", None) == "SQLITE_FULL"


def unavailable(error: sqlite3.Error, where: str) -> StoreUnavailable:
    name = getattr(error, "sqlite_errorname", None) or ""
    # An extended code, like SQLITE_IOERR_FSYNC, begins with its primary one.
    primary = "_".join(name.split("_")[:2])
    text = TROUBLES.get(primary, "{where} failed; see the server's log.")
    return StoreUnavailable(text.format(where=where))


def prepare(path: Path) -> None:
    """Create the file, readable by its owner only: files that SQLite creates can be read by others.

    An existing file is not even opened: closing it would release the locks that other connections of this
    process hold on it.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise StoreUnavailable(
            f"The database {path} cannot be created or opened: {error.strerror}. Choose another data_dir."
        ) from error


def connect(path: Path | None, busy_s: float) -> sqlite3.Connection:
    """Open a connection for the calling thread. Transactions begin and end explicitly."""
    if sqlite3.sqlite_version_info < LEAST:
        raise StoreUnavailable(f"SQLite is {sqlite3.sqlite_version}; the store needs 3.35 or newer.")
    connection = sqlite3.connect(path or ":memory:", timeout=busy_s, isolation_level=None)
    connection.execute("PRAGMA foreign_keys = ON")
    # Acknowledged writes survive a power failure.
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


# A thread with a connection. Operations that wait at the same time share a transaction, and so its fsync.


T = TypeVar("T")
Connection: TypeAlias = sqlite3.Connection
_log = logging.getLogger("dragoman.store")
MOST = 256
"""Operations in one transaction: the first one waits for the last."""
IDLE_S = 60.0


class StoreJob(Struct, Generic[T]):
    work: Callable[[Connection], T]
    future: Future[T]
    alone: bool = False
    """Runs outside of a transaction, as VACUUM requires."""
    frees: bool = False
    """Frees space, so it runs even if the disk is full."""


def run(connection: Connection, operation: SqlOperation[T]) -> T:
    """Run an operation to its end, in the current transaction."""
    try:
        statement = next(operation)
        while True:
            statement = operation.send(_execute(connection, statement))
    except StopIteration as done:
        answer: T = done.value
        return answer


def _execute(connection: Connection, statement: Statement) -> list[Row]:
    if isinstance(statement, SqlBatch):
        connection.executemany(statement.sql, statement.rows)
        return []
    return connection.execute(statement.sql, statement.values).fetchall()


class StoreWorker:
    """A thread with a connection. It calls `finish` at the end of every transaction, and periodically when
    idle.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Connection],
        where: str,
        *,
        begin: str = "BEGIN",
        finish: Callable[[Connection], None] | None = None,
        reserve: DiskReserve | None = None,
    ) -> None:
        self._connect, self._where, self._begin, self._finish = connect, where, begin, finish
        self._reserve = reserve
        self._jobs: SimpleQueue[StoreJob[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._closed = False
        self._opened: Future[None] = Future()

    def start(self) -> Future[None]:
        """Start the thread; the future completes once the connection is open or has failed."""
        self._thread.start()
        return self._opened

    def submit(
        self, work: Callable[[Connection], T], *, alone: bool = False, frees: bool = False
    ) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise StoreUnavailable("The store is closed.")
            self._jobs.put(StoreJob(work, future, alone, frees))
        return future

    def stop(self) -> None:
        """Complete waiting jobs and end the thread."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            connection = self._connect()
        except Exception as error:
            result = unavailable(error, self._where) if isinstance(error, sqlite3.Error) else error
            self._opened.set_exception(result)
            return
        if self._reserve is not None:
            self._reserve.keep()
        self._opened.set_result(None)
        try:
            while (jobs := self._waiting()) is not None:
                self._do(connection, jobs)
        finally:
            connection.close()

    def _waiting(self) -> list[StoreJob[Any]] | None:
        """Return the waiting jobs, an empty list after an idle period, or None at the end."""
        try:
            jobs = [self._jobs.get(timeout=IDLE_S)]
        except Empty:
            return []
        while len(jobs) < MOST and not self._jobs.empty():
            jobs.append(self._jobs.get())
        if jobs[-1] is None:
            # Jobs queued before the end still run.
            jobs.pop()
            if not jobs:
                return None
            self._jobs.put(None)
        return [job for job in jobs if job is not None and job.future.set_running_or_notify_cancel()]

    def _do(self, connection: Connection, jobs: list[StoreJob[Any]]) -> None:
        for job in jobs:
            if job.alone:
                self._do_alone(connection, job)
        together = [job for job in jobs if not job.alone]
        if together or not jobs:
            self._do_together(connection, together)

    def _do_alone(self, connection: Connection, job: StoreJob[Any]) -> None:
        try:
            job.future.set_result(job.work(connection))
        except Exception as error:
            job.future.set_exception(self._explain(error))

    def _do_together(self, connection: Connection, jobs: list[StoreJob[Any]]) -> None:
        """Run jobs in one transaction. A failed job is rolled back alone; if the database fails, all are."""
        answers: list[tuple[StoreJob[Any], Any]] = []
        try:
            connection.execute(self._begin)
            answers = [(job, answer) for job in jobs for answer in self._attempt(connection, job)]
            if self._finish is not None:
                self._finish(connection)
            connection.execute("COMMIT")
        except Exception as error:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            if self._reserve is not None and is_full(error) and any(job.frees for job in jobs):
                self._do_with_reserve(connection, [job for job in jobs if job.frees], self._reserve)
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(self._explain(error))
            return
        for job, answer in answers:
            job.future.set_result(answer)

    def _do_with_reserve(
        self, connection: Connection, jobs: list[StoreJob[Any]], reserve: DiskReserve
    ) -> None:
        """Run jobs that free space, using the disk reserve. Jobs that fail now have failed."""
        reserve.give()
        try:
            connection.execute(self._begin)
            answers = [(job, job.work(connection)) for job in jobs if not job.future.done()]
            connection.execute("COMMIT")
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            return
        finally:
            with suppress(sqlite3.Error):
                # Truncating the log makes space for the reserve again.
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            reserve.keep()
        for job, answer in answers:
            job.future.set_result(answer)

    def _attempt(self, connection: Connection, job: StoreJob[Any]) -> list[Any]:
        """Run a job; return its result in a list, or an empty list after rolling it back and failing its
        future.
        """
        connection.execute("SAVEPOINT job")
        try:
            answer = job.work(connection)
        except Exception as error:
            if not connection.in_transaction or is_full(error):
                # The database has aborted the whole transaction, or will.
                raise
            connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")
            job.future.set_exception(self._explain(error))
            return []
        connection.execute("RELEASE job")
        return [answer]

    def _explain(self, error: Exception) -> Exception:
        """Translate an SQLite error for the caller; our own errors pass unchanged."""
        if not isinstance(error, sqlite3.Error):
            return error
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        _log.error("Store failed: %s (%s)", name, self._where)
        # Clients must not see the path.
        return unavailable(error, "The database of the store")


# The store.

FILE = "dragoman.sqlite3"
RESERVE = "dragoman.reserve"
BUSY_S = 5.0
# Free pages are reused before the file grows, so they do not count.
USED = """SELECT (page_count - freelist_count) * page_size
    FROM pragma_page_count, pragma_freelist_count, pragma_page_size"""


class SqliteStore(Store):
    """The store in SQLite: `SqliteStore(folder, bounds)`; without a folder it lives in memory."""

    def __init__(
        self,
        folder: Path | None,
        bounds: StoreLimits,
        *,
        busy_s: float = BUSY_S,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(bounds, clock)
        self._path = folder / FILE if folder else None
        self._busy_s = busy_s
        self._presence: LivenessLock | None = None
        where = f"The database {self._path}" if self._path else "The store in memory"
        self._where = where
        self._writer = StoreWorker(
            "dragoman-store-write",
            self._connect_writer,
            where,
            begin="BEGIN IMMEDIATE",
            finish=self._sweep,
            reserve=DiskReserve(folder / RESERVE) if folder else None,
        )
        # An in-memory database belongs to its single connection.
        self._reader = StoreWorker("dragoman-store-read", self._connect, where) if folder else self._writer

    async def _open(self) -> None:
        if self._path:
            await asyncio.to_thread(prepare, self._path)
            self._presence = await asyncio.to_thread(LivenessLock, self._path.parent, self.instance)
        for worker in dict.fromkeys((self._writer, self._reader)):
            await asyncio.wrap_future(worker.start())

    async def close(self) -> None:
        await asyncio.to_thread(self._reader.stop)
        await asyncio.to_thread(self._writer.stop)
        if self._presence is not None:
            self._presence.leave()

    async def vacuum(self) -> None:
        def work(connection: Connection) -> None:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

        await asyncio.wrap_future(self._writer.submit(work, alone=True))

    async def stats(self) -> Stats:
        counts, size, oldest = await self._read(store.counts)
        version = await asyncio.wrap_future(self._reader.submit(version_of))
        return Stats(
            counts=counts,
            bytes=size,
            file_bytes=await self._file_bytes(),
            oldest=oldest,
            schema_version=version,
            bounds=self.bounds,
        )

    async def adopt_orphans(self, wants: store.Wants = lambda *_: True) -> list[Record]:
        unfinished = await self._read(store.find_unfinished)
        instances = {one for one, *_ in unfinished} - {self.instance}
        gone = {one for one in instances if not (self._presence and self._presence.is_alive(one))}
        dead = [(one, model) for one, model, at in unfinished if one in gone and wants(model, at)]
        return await self._write(lambda: store.adopt(dead, self.instance))

    async def _file_bytes(self) -> int:
        if self._path is None:
            rows = await asyncio.wrap_future(self._reader.submit(lambda c: c.execute(USED).fetchone()))
            return int(rows[0])
        files = (self._path, self._path.with_name(f"{FILE}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    async def _read(self, make: Callable[[], SqlOperation[T]]) -> T:
        return await asyncio.wrap_future(self._reader.submit(lambda connection: run(connection, make())))

    async def _write(self, make: Callable[[], SqlOperation[T]], *, frees: bool = False) -> T:
        work = self._writer.submit(lambda connection: run(connection, make()), frees=frees)
        return await asyncio.wrap_future(work)

    def _connect(self) -> Connection:
        return connect(self._path, self._busy_s)

    def _connect_writer(self) -> Connection:
        connection = self._connect()
        migrate(connection, self._where)
        return connection

    def _sweep(self, connection: Connection) -> None:
        run(connection, store.sweep(self.bounds, USED, self._clock()))
