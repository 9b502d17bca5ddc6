"""Which models of a pool are loaded: who asks loads, who is idle goes, and nobody loses what he holds."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from dragoman.errors import ModelFileError, ModelNotFound, Unavailable
from dragoman.models import ModelPool
from dragoman.settings import Settings
from dragoman.turns.queue import WorkerPool
from tests.support.pools import MB, Queues, Shop
from tests.support.wait import becomes_async


def played(pool: ModelPool, play: Callable[[], Coroutine[Any, Any, None]]) -> Queues:
    """What is open at the end is closed."""
    queues = Queues()

    async def whole() -> None:
        pool.attach(WorkerPool(), queues, None)
        await pool.start()
        try:
            await play()
        finally:
            await pool.stop()

    asyncio.run(whole())
    return queues


def few(**more: object) -> Settings:
    return Settings(store="none", **more)  # type: ignore[arg-type]


def test_one_is_loaded_when_it_is_asked_for_and_once() -> None:
    shop = Shop()
    pool = shop.pool("a", "b")

    async def play() -> None:
        assert [model.state for model in pool.models.values()] == ["unloaded", "unloaded"]
        model = pool.get("b")
        await asyncio.gather(*(pool.acquire(model) for _ in range(5)))
        assert (model.holders, shop.times, pool.get("a").state) == (5, ["b"], "unloaded")

    played(pool, play)
    assert not shop.open


def test_the_least_used_idle_one_makes_room() -> None:
    shop = Shop()
    pool = shop.pool("a", "b", "c", settings=few(models_max=2))

    async def play() -> None:
        for name in ("a", "b", "a"):
            await pool.acquire(pool.get(name))
            pool.release(pool.get(name))
        await pool.acquire(pool.get("c"))
        assert sorted(shop.open) == ["a", "c"]

    played(pool, play)


def test_memory_is_counted_before_anything_is_loaded() -> None:
    shop = Shop()
    pool = shop.pool("a", "b", "c", settings=few(memory_limit=25, kv_memory=2), size=10 * MB)

    async def play() -> None:
        for name in ("a", "b", "c"):
            await pool.acquire(pool.get(name))
            pool.release(pool.get(name))
        assert sorted(shop.open) == ["b", "c"]

    played(pool, play)


def test_one_that_can_never_fit_is_said_so() -> None:
    shop = Shop()
    pool = shop.pool("a", settings=few(memory_limit=5, kv_memory=1), size=10 * MB)

    async def play() -> None:
        with pytest.raises(Unavailable, match="about 11 MiB, and `memory_limit` leaves 5"):
            await pool.acquire(pool.get("a"))
        assert pool.get("a").status["value"] == "failed"

    played(pool, play)


def test_what_is_held_is_waited_for() -> None:
    shop = Shop()
    pool = shop.pool("a", "b", settings=few(models_max=1))

    async def play() -> None:
        await pool.acquire(pool.get("a"))
        waiting = asyncio.ensure_future(pool.acquire(pool.get("b")))
        await asyncio.sleep(0.02)
        # Who asks for the one that is to go waits as well, else it would never go.
        behind = asyncio.ensure_future(pool.acquire(pool.get("a")))
        await asyncio.sleep(0.02)
        assert shop.open == ["a"] and not waiting.done() and not behind.done()
        pool.release(pool.get("a"))
        await waiting
        assert shop.open == ["b"] and not behind.done()
        pool.release(pool.get("b"))
        await behind
        assert shop.open == ["a"]

    played(pool, play)


def test_an_idle_one_sleeps_and_wakes() -> None:
    shop = Shop()
    pool = shop.pool("a", settings=few(sleep_idle_seconds=0.01))
    model = pool.get("a")

    async def play() -> None:
        await pool.acquire(model)
        await asyncio.sleep(0.05)
        assert model.state == "loaded"
        pool.release(model)
        await becomes_async(lambda: model.state == "sleeping" and not model.is_unloading)
        assert not shop.open
        await pool.acquire(model)
        assert shop.open == ["a"]

    played(pool, play)


def test_a_client_may_say_how_long_one_stays() -> None:
    shop = Shop()
    pool = shop.pool("a", "b")
    model = pool.get("a")

    async def play() -> None:
        await pool.acquire(model)
        pool.set_keep_alive(model, 0)
        assert model.state == "loaded"
        pool.release(model)
        await becomes_async(lambda: model.state == "sleeping")

    played(pool, play)


def test_a_load_does_not_hold_up_others() -> None:
    shop = Shop()
    gate = shop.gates["b"] = threading.Event()
    pool = shop.pool("a", "b")

    async def play() -> None:
        loading = asyncio.ensure_future(pool.acquire(pool.get("b")))
        await becomes_async(lambda: pool.get("b").state == "loading")
        await pool.acquire(pool.get("a"))
        assert not loading.done()
        gate.set()
        await loading

    played(pool, play)


def test_one_that_cannot_be_loaded_says_why_without_saying_where(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop()
    settings = few(model="/secret/place/a.gguf")
    pool = shop.pool("a", "b", settings=settings)
    shop.broken["a"] = ModelFileError("/secret/place/a.gguf is damaged.")

    async def play() -> None:
        for _ in range(2):
            with pytest.raises(Unavailable) as failed:
                await pool.acquire(pool.get("a"))
            assert failed.value.message.endswith("could not be loaded: a.gguf is damaged.")
        # It is tried again, after a while.
        del shop.broken["a"]
        monkeypatch.setattr("dragoman.models.pool.TRY_AGAIN_S", 0.0)
        await pool.acquire(pool.get("a"))

    played(pool, play)


def test_a_foreign_failure_stays_in_the_log() -> None:
    shop = Shop()
    pool = shop.pool("a", "b")
    shop.broken["a"] = ValueError("SECRET")

    async def play() -> None:
        with pytest.raises(Unavailable) as failed:
            await pool.acquire(pool.get("a"))
        assert "SECRET" not in failed.value.message
        assert "SECRET" not in str(pool.get("a").status)

    played(pool, play)


def test_who_unloads_may_set_a_time() -> None:
    shop = Shop()
    pool = shop.pool("a", "b")

    async def play() -> None:
        await pool.acquire(pool.get("a"))
        await pool.unload(pool.get("a"), grace=0.01)
        assert not shop.open and pool.get("a").state == "unloaded"
        pool.release(pool.get("a"))

    played(pool, play)


def test_names_that_nobody_has() -> None:
    pool = Shop().pool("a", "b")
    with pytest.raises(ModelNotFound, match="available: a, b"):
        pool.get("c")
    assert pool.get(None).name == "a"
    assert Shop().pool("a", "b", settings=few(any_model=True)).get("c").name == "a"


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_asking_and_unloading_leaves_nothing_behind(seed: int) -> None:
    shop, draw = Shop(), random.Random(seed)
    pool = shop.pool(*"abcd", settings=few(models_max=2, sleep_idle_seconds=0.003))
    held = 0

    async def use(name: str) -> None:
        nonlocal held
        model = pool.get(name)
        loaded = await pool.acquire(model)
        assert loaded.card.name == name and shop.open.count(name) == 1 and len(shop.open) <= 2
        await asyncio.sleep(draw.random() / 200)
        assert model.loaded is loaded
        held += 1
        pool.release(model)

    async def play() -> None:
        work: list[Awaitable[None]] = []
        for _ in range(60):
            name = draw.choice("abcd")
            if draw.random() < 0.3:
                work.append(asyncio.ensure_future(pool.unload(pool.get(name))))
            else:
                work.append(asyncio.ensure_future(use(name)))
            await asyncio.sleep(draw.random() / 500)
        asked = len(work)
        await asyncio.wait_for(asyncio.gather(*work), 30)
        assert 0 < held <= asked and all(not model.holders for model in pool.models.values())

    queues = played(pool, play)
    assert not shop.open and len(queues.open) <= 2
