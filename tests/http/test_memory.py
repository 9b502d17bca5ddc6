"""Full collections are made in quiet moments, and cycles are found all the same."""

import asyncio
import gc
import itertools
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tools.walks import ask

from dragoman.engines.scripted import say
from dragoman.http import upkeep
from dragoman.http.app import App
from dragoman.http.upkeep import GcController, MemoryTrimmer
from dragoman.settings import Settings
from tests.support.tool_model import tool_model


class Node:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Collecting as it is; other tests go without (conftest.py)."""
    monkeypatch.setattr(upkeep, "gc", gc)
    yield
    gc.freeze()


@pytest.fixture
def collector(real: None) -> Iterator[GcController]:
    controller = GcController()
    controller.begin()
    yield controller
    controller.end()


def _old_cycle() -> "weakref.ref[Node]":
    """One that only a full collection finds."""
    node = Node()
    gc.collect(1)
    gc.collect(1)
    reference_type = weakref.ref(node)
    del node
    return reference_type


def test_many_objects_do_not_make_a_full_collection(collector: GcController) -> None:
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        kept = [[Node()] for _ in range(100_000)]
    finally:
        gc.callbacks.remove(note)
    assert kept
    assert set(seen) == {0}


def test_a_cycle_goes_in_a_quiet_moment(collector: GcController, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "PAUSE_S", 0.0)
    cycle = _old_cycle()
    for _ in range(upkeep.LOOKS + 1):
        gc.collect(0)
    collector.collect(quiet=False)
    assert cycle() is not None
    collector.collect(quiet=True)
    assert cycle() is None


def test_a_cycle_goes_when_memory_grows(collector: GcController, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LATEST_S", 0.0)
    cycle = _old_cycle()
    collector.collect(quiet=False)
    assert cycle() is not None
    monkeypatch.setattr(upkeep, "GROWN_BYTES", -(2**60))
    collector.collect(quiet=False)
    assert cycle() is None


@pytest.mark.usefixtures("real")
def test_in_the_end_all_is_as_before() -> None:
    gc.unfreeze()
    before = gc.get_threshold(), gc.get_freeze_count()
    controller = GcController()
    controller.begin()
    controller.end()
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def tried(spare: MemoryTrimmer, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What comes of a look each second, at so much memory before each."""
    clock = itertools.count(1000.0)
    monkeypatch.setattr(upkeep, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(upkeep, "give_back", lambda: None)
    items = []
    for size in sizes:
        monkeypatch.setattr(upkeep, "resident", lambda size=size: size)
        items.append(asyncio.run(spare.give_back()))
    return items


def test_memory_that_has_grown_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(MemoryTrimmer(), [upkeep.SPARE_BYTES], monkeypatch) == [True]


def test_memory_that_has_hardly_grown_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "GIVE_BACK_S", 0.0)
    big = 10 * upkeep.SPARE_BYTES
    assert tried(MemoryTrimmer(), [big, big + upkeep.SPARE_BYTES - 1], monkeypatch) == [True, False]


def test_memory_is_given_back_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "GIVE_BACK_S", 2.0)
    sizes = [upkeep.SPARE_BYTES * factor for factor in (1, 2, 3, 4)]
    assert tried(MemoryTrimmer(), sizes, monkeypatch) == [True, False, True, False]


def test_growth_counts_from_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "GIVE_BACK_S", 0.0)
    sizes = [upkeep.SPARE_BYTES * factor for factor in (10, 1, 2)]
    assert tried(MemoryTrimmer(), sizes, monkeypatch) == [True, False, True]


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "stream": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
    "two answers": ("/v1/completions", {"prompt": "hi", "n": 2}),
    "cut off": ("/v1/completions", {"prompt": "hi", "stop": "i"}),
    "response": ("/v1/responses", {"input": "hi"}),
    "wrong": ("/v1/completions", {"prompt": "hi", "temperature": "warm"}),
    "nowhere": ("/v1/nothing", {}),
}


async def leave_garbage(path: str, body: dict[str, Any], *before: dict[str, Any]) -> list[object]:
    """Objects of ours that only a look for garbage could free after the request, which comes after others."""
    app = App(tool_model(lambda _: say("hi")), Settings(store="memory", dialect="hermes"))
    await app.host.start()
    try:
        for each in (*before, body):
            await ask(app, path, each)
        await asyncio.sleep(0.05)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        await ask(app, path, body)
        await asyncio.sleep(0.05)
        gc.collect()
        return [result for result in gc.garbage if type(result).__module__.startswith("dragoman.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        await app.host.stop()


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_leaves_no_garbage(name: str) -> None:
    """What is over is gone: prompts and bodies do not wait for a look at everything."""
    assert asyncio.run(leave_garbage(*REQUESTS[name])) == []


def test_a_conversation_that_goes_on_leaves_no_garbage() -> None:
    first = {"messages": [{"role": "user", "content": "hi"}]}
    answered = [*first["messages"], {"role": "assistant", "content": "hi"}]
    second = {"messages": [*answered, {"role": "user", "content": "and?"}]}
    assert asyncio.run(leave_garbage("/v1/chat/completions", second, first)) == []
