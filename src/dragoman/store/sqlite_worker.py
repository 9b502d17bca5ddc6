"""A thread with a connection. Operations that wait at the same time share a transaction, and so its fsync."""

import logging
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from msgspec import Struct

from dragoman.errors import StoreUnavailable
from dragoman.store.operations import Many, Operation, Row, Statement
from dragoman.store.reserve import Reserve
from dragoman.store.sqlite_file import is_full, unavailable

T = TypeVar("T")
Connection: TypeAlias = sqlite3.Connection
_log = logging.getLogger("dragoman.store")
MOST = 256
"""Operations in one transaction: the first of them waits for the last."""
IDLE_S = 60.0


class StoreJob(Struct, Generic[T]):
    work: Callable[[Connection], T]
    future: Future[T]
    alone: bool = False
    """Outside of a transaction, as VACUUM wants it."""
    frees: bool = False
    """It makes room, so it is done on a full disk, too."""


def run(connection: Connection, operation: Operation[T]) -> T:
    """Runs an operation to its end, in whatever transaction there is."""
    try:
        statement = next(operation)
        while True:
            statement = operation.send(_execute(connection, statement))
    except StopIteration as done:
        answer: T = done.value
        return answer


def _execute(connection: Connection, statement: Statement) -> list[Row]:
    if isinstance(statement, Many):
        connection.executemany(statement.sql, statement.rows)
        return []
    return connection.execute(statement.sql, statement.values).fetchall()


class StoreWorker:
    """`finish` is done at the end of every transaction, and once in a while when there are none."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Connection],
        where: str,
        *,
        begin: str = "BEGIN",
        finish: Callable[[Connection], None] | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        self._connect, self._where, self._begin, self._finish = connect, where, begin, finish
        self._reserve = reserve
        self._jobs: SimpleQueue[StoreJob[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._closed = False
        self._opened: Future[None] = Future()

    def start(self) -> Future[None]:
        """Done when the connection is there, or has failed to be."""
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
        """Does what waits, and ends the thread."""
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
            told = unavailable(error, self._where) if isinstance(error, sqlite3.Error) else error
            self._opened.set_exception(told)
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
        """All that waits now, or nothing after a while, or None at the end."""
        try:
            jobs = [self._jobs.get(timeout=IDLE_S)]
        except Empty:
            return []
        while len(jobs) < MOST and not self._jobs.empty():
            jobs.append(self._jobs.get())
        if jobs[-1] is None:
            # The end waits for those before it.
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
            job.future.set_exception(self._told(error))

    def _do_together(self, connection: Connection, jobs: list[StoreJob[Any]]) -> None:
        """One transaction. An operation that fails is undone alone; if the database fails, all are."""
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
                    job.future.set_exception(self._told(error))
            return
        for job, answer in answers:
            job.future.set_result(answer)

    def _do_with_reserve(self, connection: Connection, jobs: list[StoreJob[Any]], reserve: Reserve) -> None:
        """What makes room is done in the room that was kept back for it. What fails then has failed."""
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
                # The log goes back to nothing, and there is room again for the reserve.
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            reserve.keep()
        for job, answer in answers:
            job.future.set_result(answer)

    def _attempt(self, connection: Connection, job: StoreJob[Any]) -> list[Any]:
        """The answer of a job, or none: then its future knows why, and nothing of it is left."""
        connection.execute("SAVEPOINT job")
        try:
            answer = job.work(connection)
        except Exception as error:
            if not connection.in_transaction or is_full(error):
                # The database has given up the whole transaction, or soon will.
                raise
            connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")
            job.future.set_exception(self._told(error))
            return []
        connection.execute("RELEASE job")
        return [answer]

    def _told(self, error: Exception) -> Exception:
        """What whoever waits gets to hear: an error of ours as it is, one of SQLite's in our words."""
        if not isinstance(error, sqlite3.Error):
            return error
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        _log.error("the store failed: %s (%s)", name, self._where)
        # Where it is, is not for clients.
        return unavailable(error, "The database of the store")
