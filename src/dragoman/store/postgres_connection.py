"""PostgreSQL through psycopg: how an operation is run, how text is written, what its errors mean."""

import re
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg import errors as pg
from psycopg_pool import PoolTimeout

from dragoman.errors import StoreUnavailable
from dragoman.store.migrations import POSTGRES, VERSION, steps
from dragoman.store.operations import Many, Operation, Row, Statement

T = TypeVar("T")
Connection: TypeAlias = AsyncConnection[Row]
SCHEMA = "dragoman"
WAIT_S = 10
"""For a connection."""
MIGRATION_LOCK = 0x64726167
"""Servers that start together migrate one after another."""

TROUBLES: dict[type[Exception], str] = {
    pg.DiskFull: "it has no room left: make some on its disk",
    pg.InsufficientPrivilege: "its user may not do that: let it make the schema `dragoman`, or own it",
    pg.ReadOnlySqlTransaction: "it is read-only: name the primary server in `store`",
    psycopg.OperationalError: "it cannot be reached: check that it runs, and its address in `store`",
    PoolTimeout: "it cannot be reached, or has too much to do",
    psycopg.ProgrammingError: "it refused what was asked: check its address in `store`",
}


def unavailable(error: Exception) -> StoreUnavailable:
    """Without the words of the error, which may quote what a client sent, or an address with its password."""
    why = next((text for kind, text in TROUBLES.items() if isinstance(error, kind)), "the log says more")
    return StoreUnavailable(f"The database of the store failed: {why}.")


async def connected(url: str) -> Connection:
    connection = await AsyncConnection.connect(url, autocommit=True, connect_timeout=WAIT_S)
    await use_schema(connection)
    return connection


async def use_schema(connection: Connection) -> None:
    """The database may be shared with others, so our tables have a schema of their own."""
    await connection.execute(f"SET search_path TO {SCHEMA}".encode())


async def drive(connection: Connection, operation: Operation[T]) -> T:
    """Runs an operation to its end, in whatever transaction there is."""
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
        if isinstance(statement, Many):
            await cursor.executemany(sql, [_escaped(row) for row in statement.rows])
            return []
        await cursor.execute(sql, _escaped(statement.values))
        if cursor.description is None:
            return []
        return [_unescaped(row) for row in await cursor.fetchall()]


def _escaped(values: Row) -> Row:
    """PostgreSQL's text cannot hold the character 0, and a client's may; so a backslash stands for it."""
    return tuple(
        value.replace("\\", "\\\\").replace("\0", "\\0") if isinstance(value, str) else value
        for value in values
    )


def _unescaped(row: Row) -> Row:
    return tuple(_plain(value) if isinstance(value, str) and "\\" in value else value for value in row)


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\0" if found[1] == "0" else found[1], text)


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
                f"The database of the store was made by a newer dragoman (its tables have version {version},"
                f" this one knows {VERSION}): update dragoman, or choose another database."
            )
        for sql in steps(version, POSTGRES):
            await connection.execute(sql.encode())
        await connection.execute("DELETE FROM schema_version")
        await connection.execute("INSERT INTO schema_version VALUES (%s)", (VERSION,))


async def version_of(connection: Connection) -> int:
    row: Any = await (await connection.execute("SELECT max(version) FROM schema_version")).fetchone()
    return row[0] or 0
