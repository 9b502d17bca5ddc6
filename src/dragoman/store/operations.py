"""An operation is a generator: it yields statements, is sent their rows, and returns its answer.

So it is written once, in SQL that SQLite and PostgreSQL both know, and knows neither threads nor sockets: one
driver runs it in a thread, the other awaits each statement. An operation runs in one transaction.
"""

from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct

T = TypeVar("T")
Row: TypeAlias = tuple[Any, ...]


class Query(Struct, frozen=True):
    """One statement; a `?` stands for each value."""

    sql: str
    values: tuple[Any, ...] = ()


class Many(Struct, frozen=True):
    """One statement, once for each row of values. It gives no rows back."""

    sql: str
    rows: Sequence[tuple[Any, ...]]


Statement: TypeAlias = Query | Many
Operation: TypeAlias = Generator[Statement, list[Row], T]


def marks(values: Sequence[object]) -> str:
    """`marks("abc")` is `?, ?, ?`: the right side of an IN."""
    return ", ".join("?" * len(values))
