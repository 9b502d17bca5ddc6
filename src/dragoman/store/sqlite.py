"""The store in a file, or in memory: SQLite with one thread that writes and one that reads."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dragoman.store import upkeep
from dragoman.store.operations import Operation
from dragoman.store.presence import Presence
from dragoman.store.records import Bounds, Record, Stats
from dragoman.store.reserve import Reserve
from dragoman.store.sqlite_file import connect, migrate, prepare, version_of
from dragoman.store.sqlite_worker import Connection, StoreWorker, run
from dragoman.store.store import Store

T = TypeVar("T")
FILE = "dragoman.sqlite3"
RESERVE = "dragoman.reserve"
BUSY_S = 5.0
# What deleting has freed is used again before the file grows, so it does not count.
USED = """SELECT (page_count - freelist_count) * page_size
    FROM pragma_page_count, pragma_freelist_count, pragma_page_size"""


class SqliteStore(Store):
    """`SqliteStore(folder, bounds)`; without a folder nothing outlives the process."""

    def __init__(
        self,
        folder: Path | None,
        bounds: Bounds,
        *,
        busy_s: float = BUSY_S,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(bounds, clock)
        self._path = folder / FILE if folder else None
        self._busy_s = busy_s
        self._presence: Presence | None = None
        where = f"The database {self._path}" if self._path else "The store in memory"
        self._where = where
        self._writer = StoreWorker(
            "dragoman-store-write",
            self._connect_writer,
            where,
            begin="BEGIN IMMEDIATE",
            finish=self._sweep,
            reserve=Reserve(folder / RESERVE) if folder else None,
        )
        # A database in memory belongs to its one connection.
        self._reader = StoreWorker("dragoman-store-read", self._connect, where) if folder else self._writer

    async def _open(self) -> None:
        if self._path:
            await asyncio.to_thread(prepare, self._path)
            self._presence = await asyncio.to_thread(Presence, self._path.parent, self.instance)
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
        counts, size, oldest = await self._read(upkeep.counts)
        version = await asyncio.wrap_future(self._reader.submit(version_of))
        return Stats(
            counts=counts,
            bytes=size,
            file_bytes=await self._file_bytes(),
            oldest=oldest,
            schema_version=version,
            bounds=self.bounds,
        )

    async def orphans(self) -> list[Record]:
        instances = await self._read(upkeep.unfinished_instances) - {self.instance}
        dead = [one for one in sorted(instances) if not (self._presence and self._presence.is_alive(one))]
        return await self._write(lambda: upkeep.adopt(dead, self.instance))

    async def _file_bytes(self) -> int:
        if self._path is None:
            rows = await asyncio.wrap_future(self._reader.submit(lambda c: c.execute(USED).fetchone()))
            return int(rows[0])
        files = (self._path, self._path.with_name(f"{FILE}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    async def _read(self, make: Callable[[], Operation[T]]) -> T:
        return await asyncio.wrap_future(self._reader.submit(lambda connection: run(connection, make())))

    async def _write(self, make: Callable[[], Operation[T]], *, frees: bool = False) -> T:
        work = self._writer.submit(lambda connection: run(connection, make()), frees=frees)
        return await asyncio.wrap_future(work)

    def _connect(self) -> Connection:
        return connect(self._path, self._busy_s)

    def _connect_writer(self) -> Connection:
        connection = self._connect()
        migrate(connection, self._where)
        return connection

    def _sweep(self, connection: Connection) -> None:
        run(connection, upkeep.sweep(self.bounds, USED, self._clock()))
