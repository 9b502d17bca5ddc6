"""Full collections are made in quiet moments, and cycles are found all the same."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from dragoman.http import upkeep
from dragoman.http.upkeep import Garbage


class Node:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def collector() -> Iterator[Garbage]:
    made = Garbage()
    made.begin()
    yield made
    made.end()


def _old_cycle() -> "weakref.ref[Node]":
    """One that only a full collection finds."""
    node = Node()
    gc.collect(1)
    gc.collect(1)
    found = weakref.ref(node)
    del node
    return found


def test_many_objects_do_not_make_a_full_collection(collector: Garbage) -> None:
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        kept = [[Node()] for _ in range(100_000)]
    finally:
        gc.callbacks.remove(note)
    assert kept
    assert 1 in seen
    assert 2 not in seen


def test_a_cycle_goes_in_a_quiet_moment(collector: Garbage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "PAUSE_S", 0.0)
    cycle = _old_cycle()
    for _ in range(gc.get_threshold()[1] + 1):
        gc.collect(1)
    collector.collect(quiet=False)
    assert cycle() is not None
    collector.collect(quiet=True)
    assert cycle() is None


def test_a_cycle_goes_when_memory_grows(collector: Garbage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LATEST_S", 0.0)
    cycle = _old_cycle()
    collector.collect(quiet=False)
    assert cycle() is not None
    monkeypatch.setattr(upkeep, "GROWN_BYTES", -(2**60))
    collector.collect(quiet=False)
    assert cycle() is None


def test_in_the_end_all_is_as_before() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    made = Garbage()
    made.begin()
    made.end()
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_memory_is_given_back_once_in_a_while(collector: Garbage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "PAUSE_S", 0.0)
    said = []
    for _ in range(2):
        for _ in range(gc.get_threshold()[1] + 1):
            gc.collect(1)
        said.append(collector.collect(quiet=True))
    assert said == [True, False]
