"""One page of promises: what was promised, what was seen, and whether it held."""

import sys
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


def scaled(count: int, scale: float, least: int = 1) -> int:
    """So many at scale 1."""
    return max(least, round(count * scale))


def progress(done: int, of: int, what: str) -> None:
    """One line, which the next one overwrites; only a hundred of them, and only for somebody who looks."""
    if sys.stderr.isatty() and (done == of or done % max(of // 100, 1) == 0):
        print(f"\r  {done:,} of {of:,} {what}", end="\n" if done == of else "", file=sys.stderr, flush=True)
