"""One page of promises: what was promised, what was seen, and whether it held."""

from collections.abc import Sequence

from bench.tables import Table
from msgspec import Struct


class Row(Struct, frozen=True):
    promise: str
    """`10,000 aborted streams leave no job`."""
    figure: str
    """What was seen: `0 live after 1 s`."""
    target: str
    passed: bool


def page(rows: Sequence[Row], where: str) -> Table:
    kept = sum(row.passed for row in rows)
    return Table(
        f"{kept} of {len(rows)} promises held",
        ("promise", "seen", "target", ""),
        [[row.promise, row.figure, row.target, "held" if row.passed else "BROKEN"] for row in rows],
        [where],
    )
