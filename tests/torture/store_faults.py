"""The store fails at its k-th statement, for every k until none is left: no client is told what is not so."""

import logging
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from msgspec import Struct, field

from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.store import sqlite
from dragoman.store.sqlite import connect
from tests.support.parrot import parrot
from tests.torture.page import Row, progress
from tests.torture.store_actions import ACTIONS, Action, ActionResult

MOST = 500
"""No action takes as many statements."""


class Trouble(Struct, frozen=True):
    name: str
    code: str
    """SQLite's name for it."""
    gives_up: bool = False
    """Whether SQLite has rolled the transaction back, as it may when the disk fails."""


TROUBLES = (
    Trouble("no space", "SQLITE_FULL"),
    Trouble("no space, and nothing left of the transaction", "SQLITE_FULL", gives_up=True),
    Trouble("I/O error", "SQLITE_IOERR_WRITE", gives_up=True),
    Trouble("locked", "SQLITE_BUSY"),
)


class Faults:
    """Fails the k-th statement after it is armed, on whatever connection that is."""

    def __init__(self, trouble: Trouble) -> None:
        self._trouble = trouble
        self._left = 0

    def arm(self, k: int) -> None:
        self._left = k

    def disarm(self) -> bool:
        """Whether the k-th statement came at all."""
        came, self._left = self._left <= 0, 0
        return came

    def check(self, connection: sqlite3.Connection) -> None:
        self._left -= 1
        if self._left == 0:
            if self._trouble.gives_up and connection.in_transaction:
                connection.execute("ROLLBACK")
            error = sqlite3.OperationalError(self._trouble.name)
            error.sqlite_errorname = self._trouble.code
            raise error


class Faulty:
    """A connection whose statements fail on order; those of sqlite3 let none of their methods be replaced."""

    def __init__(self, connection: sqlite3.Connection, faults: Faults) -> None:
        self._connection = connection
        self._faults = faults

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql != "ROLLBACK":
            self._faults.check(self._connection)
        return self._connection.execute(sql, *values)

    def executemany(self, sql: str, rows: Any) -> sqlite3.Cursor:
        self._faults.check(self._connection)
        return self._connection.executemany(sql, rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@contextmanager
def served(faults: Faults) -> Iterator[httpx.Client]:
    """A server over a real database that can be made to fail."""

    def faulty(path: Path | None, busy_s: float) -> Faulty:
        return Faulty(connect(path, busy_s), faults)

    with ExitStack() as stack:
        for name in ("dragoman.store", "dragoman.http"):
            stack.enter_context(patch.object(logging.getLogger(name), "disabled", True))
        stack.enter_context(patch.object(sqlite, "connect", faulty))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        settings = Settings(port=0, store="sqlite", data_dir=folder)
        url = stack.enter_context(background(parrot(), settings))
        yield stack.enter_context(httpx.Client(base_url=url, timeout=120))


class Count(Struct):
    failures: int = 0
    untrue: list[str] = field(default_factory=list)
    """Acknowledgements of what is not there, and refusals of what is there in part."""
    unclear: list[str] = field(default_factory=list)


def tried(trouble: Trouble, actions: Mapping[str, Action] = ACTIONS) -> Count:
    count, faults = Count(), Faults(trouble)
    with served(faults) as client:
        for number, (name, action) in enumerate(actions.items()):
            count.failures += _each_statement(client, faults, action, count, f"{name}, {trouble.name}")
            progress(number + 1, len(actions), f"actions, {trouble.name}")
    return count


def _each_statement(client: httpx.Client, faults: Faults, action: Action, count: Count, what: str) -> int:
    """How many statements there were to fail."""
    for k in range(1, MOST):
        act = action(client)
        faults.arm(k)
        result = act()
        failed = faults.disarm()
        _judge(count, f"{what} at statement {k}", result)
        if not failed:
            return k - 1
    raise AssertionError(f"{what}: more than {MOST} statements")


def _judge(count: Count, what: str, told: ActionResult) -> None:
    if not told.holds():
        count.untrue.append(f"{what}: {'acknowledged' if told.acknowledged else 'refused'}, and it is not so")
    if not told.clear:
        count.unclear.append(f"{what}: refused, and not told why")


def run(scale: float = 1.0, seed: int = 1) -> list[Row]:
    """There are only so many places to fail at, and all are tried whatever the scale."""
    counts = [tried(trouble) for trouble in TROUBLES]
    untrue = [line for count in counts for line in count.untrue]
    unclear = [line for count in counts for line in count.unclear]
    print(*untrue, *unclear, sep="\n", end="\n" if untrue or unclear else "")
    failures = sum(count.failures for count in counts)
    what = f"{failures:,} faults of the store, at every statement of {len(ACTIONS)} actions"
    return [
        Row(f"{what}: told what is not so", f"{len(untrue)}", "0", not untrue and failures > 0),
        Row(f"{what}: not told why", f"{len(unclear)}", "0", not unclear),
    ]
