"""The store in PostgreSQL, which several servers may share."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection, IsolationLevel
from psycopg import errors as pg
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from dragoman.errors import StoreUnavailable
from dragoman.store import store
from dragoman.store.records import (
    POSTGRES,
    VERSION,
    Query,
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

# PostgreSQL through psycopg: running operations, escaping text, translating errors.


T = TypeVar("T")
Connection: TypeAlias = AsyncConnection[Row]
SCHEMA = "dragoman"
WAIT_S = 10
"""Seconds to wait for a connection."""
MIGRATION_LOCK = 0x64726167
"""The lock that makes servers which start together migrate one after another."""

TROUBLES: dict[type[Exception], str] = {
    pg.DiskFull: "it has no room left: free some space on its disk",
    pg.InsufficientPrivilege: "its user lacks permissions: let it create the schema `dragoman`, or own it",
    pg.ReadOnlySqlTransaction: "it is read-only: name the primary server in `store`",
    psycopg.OperationalError: "it cannot be reached: check that it runs, and its URL in `store`",
    PoolTimeout: "it cannot be reached, or is overloaded",
    psycopg.ProgrammingError: "it rejected a statement: check its URL in `store`",
}


def unavailable(error: Exception) -> StoreUnavailable:
    """Translate an error without its text, which may quote what a client sent, or a URL with its password."""
    why = next((text for kind, text in TROUBLES.items() if isinstance(error, kind)), "see the server's log")
    return StoreUnavailable(f"The database of the store failed: {why}.")


async def connect(url: str) -> Connection:
    connection = await AsyncConnection.connect(url, autocommit=True, connect_timeout=WAIT_S)
    await use_schema(connection)
    return connection


async def use_schema(connection: Connection) -> None:
    """Use our own schema, because the database may be shared with other applications."""
    await connection.execute(f"SET search_path TO {SCHEMA}".encode())


async def drive(connection: Connection, operation: SqlOperation[T]) -> T:
    """Run an operation to its end, in the current transaction."""
    try:
        statement = next(operation)
        while True:
            statement = operation.send(await _execute(connection, statement))
    except StopIteration as done:
        answer: T = done.value
        return answer


async def _execute(connection: Connection, statement: Statement) -> list[Row]:
    sql = statement.sql.replace("?", "%s").encode()
    async with connection.cursor() as cursor:
        if isinstance(statement, SqlBatch):
            await cursor.executemany(sql, [_escape(row) for row in statement.rows])
            return []
        await cursor.execute(sql, _escape(statement.values))
        if cursor.description is None:
            return []
        return [_unescape(row) for row in await cursor.fetchall()]


def _escape(values: Row) -> Row:
    """Escape NUL characters with a backslash: PostgreSQL's text cannot contain them."""
    return tuple(
        value.replace("\\", "\\\\").replace("\0", "\\0") if isinstance(value, str) else value
        for value in values
    )


def _unescape(row: Row) -> Row:
    return tuple(_plain(value) if isinstance(value, str) and "\\" in value else value for value in row)


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\0" if match[1] == "0" else match[1], text)


async def migrate(connection: Connection) -> None:
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
        await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}".encode())
        await connection.execute("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)")
        await connection.execute(
            """CREATE TABLE IF NOT EXISTS servers
                (instance TEXT PRIMARY KEY, expires_at DOUBLE PRECISION NOT NULL)"""
        )
        version = await version_of(connection)
        if version > VERSION:
            raise StoreUnavailable(
                "The database of the store was created by a newer dragoman (its tables have "
                f"version {version}, this one knows {VERSION}): update dragoman, or choose "
                "another database."
            )
        for sql in steps(version, POSTGRES):
            await connection.execute(sql.encode())
        await connection.execute("DELETE FROM schema_version")
        await connection.execute("INSERT INTO schema_version VALUES (%s)", (VERSION,))


async def version_of(connection: Connection) -> int:
    row: Any = await (await connection.execute("SELECT max(version) FROM schema_version")).fetchone()
    return row[0] or 0


# The store.

_log = logging.getLogger("dragoman.store")
LEASE_S = 30.0
TRIES = 5
"""Attempts of a transaction that conflicts with others."""
SLACK = 64
"""Summing all sizes is expensive, so it is done after every 64th of the limit."""
SWEEP_LOCK = 0x64726168

NOW = "extract(epoch FROM now())::float8"
LIVING = f"SELECT instance FROM servers WHERE expires_at > {NOW}"
RENEW = f"""INSERT INTO servers (instance, expires_at) VALUES (?, {NOW} + ?)
    ON CONFLICT (instance) DO UPDATE SET expires_at = excluded.expires_at"""
ON_DISK = f"""SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class
    WHERE relnamespace = '{SCHEMA}'::regnamespace AND relkind = 'r'"""


class PostgresStore(Store):
    def __init__(
        self,
        url: str,
        bounds: StoreLimits,
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(bounds, clock)
        self._url = url
        self._lease_s = lease_s
        self._pool: AsyncConnectionPool[Connection] | None = None
        self._upkeep: asyncio.Task[None] | None = None

    async def _open(self) -> None:
        # A separate connection: the pool would retry for long, where one failure is conclusive.
        with _translating_errors():
            async with await connect(self._url) as connection:
                await migrate(connection)
            self._pool = AsyncConnectionPool(
                self._url,
                kwargs={"autocommit": True},
                min_size=1,
                max_size=10,
                timeout=WAIT_S,
                open=False,
                configure=use_schema,
                # A restart of the database must not fail the next request.
                check=AsyncConnectionPool.check_connection,
            )
            await self._pool.open()
        await self._write(self._renewal)
        self._upkeep = asyncio.create_task(self._keep_up())

    async def close(self) -> None:
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait([self._upkeep])
            self._upkeep = None
            with contextlib.suppress(StoreUnavailable):
                await self._run(self._farewell)
        if self._pool is not None:
            await self._pool.close()
            self._pool = None

    async def vacuum(self) -> None:
        """Vacuum without locking tables, so only free space at their ends is returned to the disk."""
        async with self._connection() as connection:
            await connection.execute("VACUUM (ANALYZE) records, labels, conversations, items, media, shown")

    async def stats(self) -> Stats:
        counts, size, oldest = await self._read(store.counts)
        async with self._connection() as connection:
            version = await version_of(connection)
        return Stats(
            counts=counts,
            bytes=size,
            file_bytes=(await self._read(lambda: _rows(ON_DISK)))[0][0],
            oldest=oldest,
            schema_version=version,
            bounds=self.bounds,
        )

    async def adopt_orphans(self, wants: store.Wants = lambda *_: True) -> list[Record]:
        unfinished = await self._read(store.find_unfinished)
        living = {self.instance, *(row[0] for row in await self._read(lambda: _rows(LIVING)))}
        dead = [(one, model) for one, model, at in unfinished if one not in living and wants(model, at)]
        return await self._write(lambda: store.adopt(dead, self.instance))

    async def _read(self, make: Callable[[], SqlOperation[T]]) -> T:
        # All statements see the same snapshot.
        return await self._run(make, IsolationLevel.REPEATABLE_READ)

    async def _write(self, make: Callable[[], SqlOperation[T]], *, frees: bool = False) -> T:
        answer = await self._run(make)
        if self.bounds.max_bytes is not None and self._grown > self.bounds.max_bytes // SLACK:
            # The write is committed, even if this fails.
            with _logging_trouble():
                await self._sweep()
        return answer

    async def _run(self, make: Callable[[], SqlOperation[T]], level: IsolationLevel | None = None) -> T:
        for _ in range(TRIES):
            with contextlib.suppress(pg.DeadlockDetected, pg.SerializationFailure):
                async with self._connection() as connection:
                    await connection.set_isolation_level(level)
                    async with connection.transaction():
                        return await drive(connection, make())
        raise StoreUnavailable("The database of the store is contended; retry.")

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        if self._pool is None:
            raise StoreUnavailable("The store is closed.")
        with _translating_errors():
            async with self._pool.connection() as connection:
                yield connection

    async def _sweep(self) -> None:
        most, self._grown = self.bounds.max_bytes if self._grown else None, 0
        within = StoreLimits(
            # Leave room for what is written before the next sweep.
            max_bytes=None if most is None else most - most // SLACK,
            max_age=self.bounds.max_age,
        )
        await self._run(lambda: self._sweep_alone(within))

    def _sweep_alone(self, bounds: StoreLimits) -> SqlOperation[None]:
        """Sweep, unless another server does."""
        if (yield Query("SELECT pg_try_advisory_xact_lock(?)", (SWEEP_LOCK,)))[0][0]:
            yield from store.sweep(bounds, store.BYTES, self._clock())

    async def _keep_up(self) -> None:
        """Renew this server's lease and drop expired records, periodically."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            with _logging_trouble():
                await self._run(self._renewal)
                await self._sweep()

    def _renewal(self) -> SqlOperation[None]:
        yield Query(RENEW, (self.instance, self._lease_s))
        yield Query(f"DELETE FROM servers WHERE expires_at < {NOW} - 86400")

    def _farewell(self) -> SqlOperation[None]:
        yield Query("DELETE FROM servers WHERE instance = ?", (self.instance,))


@contextlib.contextmanager
def _logging_trouble() -> Iterator[None]:
    """Log errors of background work, which runs again later."""
    try:
        yield
    except StoreUnavailable as error:
        _log.warning("Upkeep of the store failed: %s", error.message)


def _rows(sql: str) -> SqlOperation[list[Row]]:
    return (yield Query(sql))


@contextlib.contextmanager
def _translating_errors() -> Iterator[None]:
    try:
        yield
    except (pg.DeadlockDetected, pg.SerializationFailure):
        raise
    except (psycopg.Error, PoolTimeout) as error:
        _log.error("Store failed: %s", getattr(error, "sqlstate", None) or type(error).__name__)
        raise unavailable(error) from error
