"""The store in PostgreSQL, which several servers may share."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

import psycopg
from psycopg import IsolationLevel
from psycopg import errors as pg
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from dragoman.errors import StoreUnavailable
from dragoman.store import upkeep
from dragoman.store.operations import Operation, Query, Row
from dragoman.store.postgres_connection import (
    SCHEMA,
    WAIT_S,
    Connection,
    connected,
    drive,
    migrate,
    unavailable,
    use_schema,
    version_of,
)
from dragoman.store.records import Bounds, Record, Stats
from dragoman.store.store import Store

T = TypeVar("T")
_log = logging.getLogger("dragoman.store")
LEASE_S = 30.0
TRIES = 5
"""Of a transaction that got in another's way."""
SLACK = 64
"""Adding up all sizes is no small thing, so it is done after every 64th of the bound."""
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
        bounds: Bounds,
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
        # A connection of its own: the pool would go on trying for long where one failure says enough.
        with _told():
            async with await connected(self._url) as connection:
                await migrate(connection)
            self._pool = AsyncConnectionPool(
                self._url,
                kwargs={"autocommit": True},
                min_size=1,
                max_size=10,
                timeout=WAIT_S,
                open=False,
                configure=use_schema,
                # So that a restart of the database is not noticed by the next request.
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
        """The tables can be used meanwhile, so only what is free at their ends goes back to the disk."""
        async with self._connection() as connection:
            await connection.execute("VACUUM (ANALYZE) records, labels, conversations, items")

    async def stats(self) -> Stats:
        counts, size, oldest = await self._read(upkeep.counts)
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

    async def orphans(self) -> list[Record]:
        instances = await self._read(upkeep.unfinished_instances)
        living = {row[0] for row in await self._read(lambda: _rows(LIVING))}
        dead = sorted(instances - living - {self.instance})
        return await self._write(lambda: upkeep.adopt(dead, self.instance))

    async def _read(self, make: Callable[[], Operation[T]]) -> T:
        # All statements see the same state.
        return await self._run(make, IsolationLevel.REPEATABLE_READ)

    async def _write(self, make: Callable[[], Operation[T]], *, frees: bool = False) -> T:
        answer = await self._run(make)
        if self.bounds.max_bytes is not None and self._grown > self.bounds.max_bytes // SLACK:
            # What was written is written, whatever becomes of this.
            with _logged():
                await self._sweep()
        return answer

    async def _run(self, make: Callable[[], Operation[T]], level: IsolationLevel | None = None) -> T:
        for _ in range(TRIES):
            with contextlib.suppress(pg.DeadlockDetected, pg.SerializationFailure):
                async with self._connection() as connection:
                    await connection.set_isolation_level(level)
                    async with connection.transaction():
                        return await drive(connection, make())
        raise StoreUnavailable("The database of the store is contended; try again.")

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        if self._pool is None:
            raise StoreUnavailable("The store is closed.")
        with _told():
            async with self._pool.connection() as connection:
                yield connection

    async def _sweep(self) -> None:
        most, self._grown = self.bounds.max_bytes if self._grown else None, 0
        within = Bounds(
            # Room for what comes until the next time.
            max_bytes=None if most is None else most - most // SLACK,
            max_age=self.bounds.max_age,
        )
        await self._run(lambda: self._sweep_alone(within))

    def _sweep_alone(self, bounds: Bounds) -> Operation[None]:
        """Unless another server is at it."""
        if (yield Query("SELECT pg_try_advisory_xact_lock(?)", (SWEEP_LOCK,)))[0][0]:
            yield from upkeep.sweep(bounds, upkeep.BYTES, self._clock())

    async def _keep_up(self) -> None:
        """Says again and again that this server lives, and drops what has grown too old."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            with _logged():
                await self._run(self._renewal)
                await self._sweep()

    def _renewal(self) -> Operation[None]:
        yield Query(RENEW, (self.instance, self._lease_s))
        yield Query(f"DELETE FROM servers WHERE expires_at < {NOW} - 86400")

    def _farewell(self) -> Operation[None]:
        yield Query("DELETE FROM servers WHERE instance = ?", (self.instance,))


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """For what nobody waits for, and is done again later."""
    try:
        yield
    except StoreUnavailable as error:
        _log.warning("the upkeep of the store failed: %s", error.message)


def _rows(sql: str) -> Operation[list[Row]]:
    return (yield Query(sql))


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (pg.DeadlockDetected, pg.SerializationFailure):
        raise
    except (psycopg.Error, PoolTimeout) as error:
        _log.error("the store failed: %s", getattr(error, "sqlstate", None) or type(error).__name__)
        raise unavailable(error) from error
