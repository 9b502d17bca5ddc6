"""Ways to ask that take turns, each being first in every other round.

A ratio is that of two ways in one round, and the median of these is told with the least and the most: medians
of each alone can come from different rounds, and on a disturbed machine they then compare nothing.
"""

import statistics
from collections.abc import Sequence
from typing import TypeVar

from bench.tables import ratio

T = TypeVar("T")


def turns(ways: Sequence[T], number: int) -> Sequence[T]:
    """The ways in the order of this round."""
    return ways[:: -1 if number % 2 else 1]


def paired(values: Sequence[float], plain: Sequence[float]) -> str:
    """`0.98x (0.95 to 1.01)`: the ratio within each round, its median and its range."""
    ratios = [one / other for one, other in zip(values, plain, strict=True)]
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def beside(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Our median over the peer's; nothing where we were not measured."""
    return ratio(statistics.median(ours), statistics.median(theirs)) if ours else ""
