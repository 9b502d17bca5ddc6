"""The engine's thread over a fake runner: hand-over, stopping, failing."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from dragoman.engines.local import LocalEngine
from dragoman.engines.local.runner import StepInterrupted
from dragoman.errors import EngineFailed, Unavailable
from dragoman.types import Step
from tests.engines.local.scripted import engine_over
from tests.engines.local.support import FakeRunner, job
from tests.support.wait import becomes

LONG = list(range(40))


def with_engine(use: Callable[[LocalEngine, FakeRunner], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        runner = FakeRunner()
        engine = engine_over(runner)
        try:
            await use(engine, runner)
        finally:
            await engine.stop()
        assert runner.closed

    asyncio.run(main())


def until(event: threading.Event) -> Callable[[], None]:
    def wait() -> None:
        event.wait()

    return wait


def test_sinks_run_on_the_loops_thread_and_one_wake_up_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(engine: LocalEngine, runner: FakeRunner) -> None:
        loop = asyncio.get_running_loop()
        wakes = []
        handed = loop.call_soon_threadsafe

        def count(*call: Any, **kinds: Any) -> Any:
            wakes.append(call)
            return handed(*call, **kinds)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        threads = set()
        finished = asyncio.Semaphore(0)

        def sink(step: Step) -> None:
            threads.add(threading.current_thread())
            if step.finish:
                finished.release()

        ready = threading.Event()
        runner.before_step = until(ready)
        for n in range(4):
            engine.submit(job([n], 6), sink)
        ready.set()
        for _ in range(4):
            await finished.acquire()
        assert threads == {threading.current_thread()}
        assert len(wakes) <= len(runner.steps)

    with_engine(use)


def test_cancel_interrupts_only_when_nobody_else_is_in_the_step() -> None:
    async def use(engine: LocalEngine, runner: FakeRunner) -> None:
        inside, go = threading.Event(), threading.Event()
        interrupts = []

        def pause() -> None:
            inside.set()
            go.wait()

        runner.interrupt = lambda: interrupts.append(1)  # type: ignore[method-assign]
        runner.before_step = pause
        first = engine.submit(job([1], 50), lambda step: None)
        await asyncio.to_thread(inside.wait)
        second = engine.submit(job([2], 50), lambda step: None)
        first.cancel()
        assert interrupts == [1]
        second.cancel()
        runner.before_step = lambda: None
        go.set()
        await engine.check()
        del runner.interrupt

    with_engine(use)


def test_an_error_in_the_thread_ends_everything(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        runner = FakeRunner()
        engine = engine_over(runner)

        def break_down(beside: object) -> None:
            raise ZeroDivisionError("a secret")

        engine._scheduler.step = break_down  # type: ignore[method-assign, assignment]
        steps: list[Step] = []
        engine.submit(job([1, 2], 5, n=2), steps.append)
        with pytest.raises(EngineFailed):
            await anext(engine.generate(job([1])))
        assert [step.finish for step in steps] == ["error", "error"]
        assert isinstance(steps[0].error, EngineFailed)
        assert "secret" not in str(steps[0].error)
        with pytest.raises(EngineFailed):
            await engine.check()
        with pytest.raises(EngineFailed):
            await anext(engine.generate(job([1])))
        with pytest.raises(EngineFailed):
            await engine.embed([[1]])
        await engine.stop()

    asyncio.run(main())
    assert "ZeroDivisionError" in caplog.text


def test_check_is_a_round_trip() -> None:
    async def use(engine: LocalEngine, runner: FakeRunner) -> None:
        await engine.start()
        await engine.check()
        go = threading.Event()
        runner.before_step = until(go)
        engine.submit(job(LONG, 3), lambda step: None)
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(engine.check())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        go.set()
        await waiting

    with_engine(use)


def test_the_runner_is_closed_by_the_thread_that_computed_and_only_then_is_it_stopped() -> None:
    async def main() -> None:
        runner, closed_by = FakeRunner(), list[threading.Thread]()
        close = runner.close

        def closing() -> None:
            closed_by.append(threading.current_thread())
            close()

        runner.close = closing  # type: ignore[method-assign]
        engine = engine_over(runner)
        await engine.start()
        await engine.stop()
        assert [thread.name for thread in closed_by] == ["dragoman-engine"]
        assert not closed_by[0].is_alive()
        assert str(closed_by[0].native_id) not in os.listdir("/proc/self/task")

    asyncio.run(main())


def test_a_step_that_was_just_begun_is_broken_off_as_well() -> None:
    """The first interruption came too early for it, so there is another."""

    async def use(engine: LocalEngine, runner: FakeRunner) -> None:
        inside, go, interrupts = threading.Event(), threading.Event(), list[int]()

        def interrupt() -> None:
            interrupts.append(1)
            if len(interrupts) > 1:
                go.set()

        def pause() -> None:
            inside.set()
            go.wait()

        runner.interrupt = interrupt  # type: ignore[method-assign]
        runner.before_step = pause
        engine.submit(job([1], 50), lambda step: None)
        await asyncio.to_thread(inside.wait)

    with_engine(use)


def test_a_thread_that_is_stuck_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dragoman.engines.local.engine_thread.STOP_S", 0.05)
    inside, go = threading.Event(), threading.Event()

    def stick() -> None:
        inside.set()
        go.wait()

    async def main() -> None:
        runner = FakeRunner()
        runner.before_step = stick
        engine = engine_over(runner)
        engine.submit(job([1], 5), lambda step: None)
        await asyncio.to_thread(inside.wait)
        await engine.stop()
        assert not runner.closed
        go.set()
        assert becomes(lambda: runner.closed)

    asyncio.run(main())
    assert "abandoned" in caplog.text


def test_an_interruption_that_hits_an_embedding_is_not_the_engines_end() -> None:
    async def use(engine: LocalEngine, runner: FakeRunner) -> None:
        def embed(prompts: Any) -> Any:
            raise StepInterrupted
            yield

        runner.embed = embed  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await engine.embed([[1]])
        await engine.check()

    with_engine(use)


def test_a_warm_up_that_is_broken_off_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that is stopped just after its start says nothing of errors."""

    def broken_off(_: FakeRunner) -> None:
        raise StepInterrupted

    monkeypatch.setattr(FakeRunner, "warm_up", broken_off)

    async def use(engine: LocalEngine, _: FakeRunner) -> None:
        assert [step async for step in engine.generate(job([1, 2], 2))][-1].finish

    with_engine(use)
    assert not caplog.records
