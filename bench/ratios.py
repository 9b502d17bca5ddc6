"""The ratios of a run, as a file that `python -m bench.check` reads: two ways in rounds that took turns.

A ratio is that of two ways in one round, and the median of these is told with the least and the most.
"""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.errors import BenchError
from bench.tables import OUT


class Ratio(Struct, frozen=True):
    """`Ratio("64 streams", "tokens/s", [30.0, 33.0], [10.0, 10.0]).median` is 3.15."""

    key: str
    """Which of the ratios of its module it is."""
    unit: str
    ours: Sequence[float]
    """In each round."""
    theirs: Sequence[float]
    less_is_better: bool = False
    """Then it is theirs over ours: above 1 dragoman is ahead, whatever is measured."""

    @property
    def rounds(self) -> list[float]:
        pairs = zip(self.ours, self.theirs, strict=True)
        return [theirs / ours if self.less_is_better else ours / theirs for ours, theirs in pairs]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def write(name: str, ratios: Iterable[Ratio]) -> None:
    """Those of the module `bench.NAME`, as `out/NAME.ratios.json`."""
    known: dict[str, Ratio] = {}
    for one in ratios:
        if one.key in known:
            raise BenchError(f"bench.{name} has two ratios named {one.key}.")
        if not one.ours or not all((*one.ours, *one.theirs)):
            raise BenchError(f"bench.{name} measured nothing for {one.key}.")
        known[one.key] = one
    OUT.mkdir(exist_ok=True)
    file_of(name).write_bytes(msgspec.json.encode(list(known.values())))


def read(name: str) -> dict[str, Ratio]:
    """What the last run of `bench.NAME` wrote, by key."""
    return {one.key: one for one in msgspec.json.decode(file_of(name).read_bytes(), type=list[Ratio])}


def file_of(name: str) -> Path:
    return OUT / f"{name}.ratios.json"
