"""Work off the event loop: who is served when there are more works than threads."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from dragoman.turns.queue import LOOKING_OF_ONE_KEY, OF_ONE_KEY, OFFLOAD_BYTES, THREADS, WorkerPool

BIG = OFFLOAD_BYTES + 1


class Stage:
    """Works that last until they are let go; `begun` has their names as their threads came to run."""

    def __init__(self) -> None:
        self.workers = WorkerPool()
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def ask(self, name: str, owner: str, size: int = BIG, *, looks: bool = False) -> "asyncio.Task[str]":
        gate = self._gates[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            assert gate.wait(30)
            return name

        return asyncio.ensure_future(self.workers.run(owner, size, work, low_priority=looks))

    async def let_go(self, name: str) -> None:
        self._gates[name].set()
        await settled()

    async def end(self, *asked: Awaitable[Any]) -> None:
        for gate in self._gates.values():
            gate.set()
        await asyncio.gather(*asked, return_exceptions=True)
        await self.workers.close()


async def settled() -> None:
    """What can begin has begun."""
    await asyncio.sleep(0.05)


def staged(play: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(play(Stage()))


def test_what_is_small_has_no_thread() -> None:
    async def play() -> int:
        return await WorkerPool().run("a", OFFLOAD_BYTES, threading.get_ident)

    assert asyncio.run(play()) == threading.get_ident()


def test_what_is_big_or_slow_has_one() -> None:
    async def play() -> set[int]:
        workers = WorkerPool()
        numbers = {
            await workers.run("a", BIG, threading.get_ident),
            await workers.run("a", 0, threading.get_ident, always_offload=True),
        }
        await workers.close()
        return numbers

    assert threading.get_ident() not in asyncio.run(play())


def test_an_error_reaches_the_one_who_asked() -> None:
    async def play() -> None:
        workers = WorkerPool()
        with pytest.raises(ZeroDivisionError):
            await workers.run("a", BIG, lambda: 1 // 0)
        await workers.close()

    asyncio.run(play())


def test_no_key_has_all_threads() -> None:
    async def play(stage: Stage) -> None:
        flood = [stage.ask(f"a{number}", "a") for number in range(10)]
        other = stage.ask("b", "b")
        await settled()
        assert sorted(stage.begun) == ["a0", "a1", "b"]
        assert OF_ONE_KEY == 2 < THREADS
        await stage.end(*flood, other)

    staged(play)


def test_keys_take_turns() -> None:
    async def play(stage: Stage) -> None:
        first = [stage.ask(f"{owner}{number}", owner) for owner in "ab" for number in range(3)]
        await settled()
        late = stage.ask("c0", "c")
        await stage.let_go("a0")
        assert stage.begun[-1] == "c0"
        await stage.end(*first, late)

    staged(play)


def test_looking_waits_for_planning() -> None:
    async def play(stage: Stage) -> None:
        asked = [stage.ask(f"p{number}", "a") for number in range(2)]
        await settled()
        asked += [stage.ask("look", "a", looks=True), stage.ask("plan", "a")]
        await stage.let_go("p0")
        assert sorted(stage.begun) == ["p0", "p1", "plan"]
        await stage.end(*asked)

    staged(play)


def test_looking_leaves_threads_to_planning() -> None:
    async def play(stage: Stage) -> None:
        asked = [stage.ask(f"{owner}{number}", owner, looks=True) for owner in "abc" for number in range(3)]
        await settled()
        assert sorted(stage.begun) == ["a0", "b0"]
        assert LOOKING_OF_ONE_KEY == 1
        asked.append(stage.ask("plan", "a"))
        await settled()
        assert stage.begun[-1] == "plan"
        await stage.end(*asked)

    staged(play)


def test_of_one_key_the_small_goes_first() -> None:
    async def play(stage: Stage) -> None:
        asked = [stage.ask("one", "a"), stage.ask("two", "a")]
        await settled()
        asked += [stage.ask("big", "a", 16 * 2**20), stage.ask("small", "a")]
        await stage.let_go("one")
        assert stage.begun[2:] == ["small"]
        await stage.end(*asked)

    staged(play)


def test_what_nobody_waits_for_is_not_begun() -> None:
    async def play(stage: Stage) -> None:
        asked = [stage.ask(name, "a") for name in ("one", "two", "three")]
        await settled()
        asked[2].cancel()
        await stage.let_go("one")
        assert sorted(stage.begun) == ["one", "two"]
        await stage.end(*asked)

    staged(play)


def test_after_the_close_there_is_no_thread() -> None:
    before = set(threading.enumerate())

    async def play(stage: Stage) -> None:
        asked = [stage.ask(f"a{number}", "a") for number in range(5)]
        await settled()
        await stage.end(*asked)

    staged(play)
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("dragoman-work")]


def test_who_looks_rests_for_as_long_while_others_wait_for_answers() -> None:
    async def play() -> float:
        workers = WorkerPool()
        workers.has_waiting_others = lambda owner: owner == "a"
        began, ended = list[float](), list[float]()

        def look() -> None:
            began.append(time.monotonic())
            time.sleep(0.05)
            ended.append(time.monotonic())

        await asyncio.gather(*(workers.run("a", BIG, look, low_priority=True) for _ in range(2)))
        await workers.close()
        return began[1] - ended[0]

    assert asyncio.run(play()) > 0.04


def test_what_an_answer_waits_for_does_not_wait_for_the_rest() -> None:
    async def play(stage: Stage) -> None:
        stage.workers.has_waiting_others = lambda owner: True
        looks = [stage.ask(f"look {n}", "a", looks=True) for n in range(2)]
        await settled()
        await stage.let_go("look 0")
        plan = stage.ask("plan", "a")
        await settled()
        assert "plan" in stage.begun
        await stage.end(*looks, plan)

    staged(play)


def test_who_is_alone_does_not_rest() -> None:
    async def play(stage: Stage) -> None:
        looks = [stage.ask(f"look {n}", "a", looks=True) for n in range(2)]
        await settled()
        await stage.let_go("look 0")
        assert stage.begun == ["look 0", "look 1"]
        await stage.end(*looks)

    staged(play)


def test_a_key_is_forgotten_when_it_has_rested() -> None:
    async def play() -> None:
        workers = WorkerPool()
        workers.has_waiting_others = lambda owner: True
        await workers.run("a", BIG, lambda: None, low_priority=True)
        async with asyncio.timeout(30):
            while workers._keys:
                await asyncio.sleep(0.001)
        await workers.close()

    asyncio.run(play())
