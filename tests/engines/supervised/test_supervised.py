"""An engine that fails or is stuck: who is told what, and that it comes back."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from dragoman.engines.local import LocalEngine
from dragoman.engines.local.step_guard import MOST_REBUILDS
from dragoman.engines.protocol import (
    CallbackEngine,
    EmbeddingEngine,
    LifecycleEngine,
    OwnerAwareEngine,
    PausableEngine,
)
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.engines.supervisor import INTERVAL_S, Backoff, EngineWatchdog, SupervisedEngine
from dragoman.errors import EngineFailed, ModelFileError, Unavailable
from dragoman.media import Media
from dragoman.types import Job, Sampling, Step
from tests.engines.local.scripted import engine_over, expected, vector_of
from tests.engines.local.support import FakeRunner
from tests.engines.local.support import job as greedy


def job(n: int = 1) -> Job:
    return Job(id="1", prompt=(1, 2), sampling=Sampling(max_tokens=100), n=n)


class Steps(list[Step]):
    """A sink that can be waited for."""

    def __init__(self, n: int = 1) -> None:
        self._left = n
        self.over = asyncio.Event()

    def __call__(self, step: Step) -> None:
        self.append(step)
        self._left -= step.finish is not None
        if not self._left:
            self.over.set()

    @property
    def errors(self) -> list[type[Exception]]:
        return [type(step.error) for step in self if step.error is not None]


def supervised(open: Callable[[], Any], use: Callable[[SupervisedEngine], Coroutine[Any, Any, None]]) -> None:
    """With an engine that has started, and whatever `open` makes after it."""

    async def main() -> None:
        engine = SupervisedEngine(open)
        await engine.start()
        try:
            await use(engine)
        finally:
            await engine.stop()

    asyncio.run(main())


async def back(engine: SupervisedEngine) -> None:
    """Wait until it can be asked again."""
    while True:
        try:
            return await engine.check()
        except Unavailable:
            await asyncio.sleep(0.01)


async def said(engine: SupervisedEngine) -> bytes:
    return bytes([id_ async for step in engine.generate(job()) for id_ in step.ids if id_ < 256])


def test_a_crash_is_told_to_everyone_and_healed() -> None:
    opened: list[ScriptedEngine] = []

    def script(asked: Job) -> Any:
        return say("hello", fault="crash" if asked.n == 2 else None, fault_at=2)

    def open() -> ScriptedEngine:
        opened.append(ScriptedEngine(script))
        return opened[-1]

    async def use(engine: SupervisedEngine) -> None:
        begun, others = Steps(), Steps(2)
        engine.submit(job(), begun)
        engine.submit(job(2), others)
        await begun.over.wait()
        await others.over.wait()
        assert begun.errors == [EngineFailed]
        assert [step.finish for step in others][-2:] == ["error", "error"]
        await back(engine)
        assert await said(engine) == b"hello"
        assert len(opened) == 2

    supervised(open, use)


def test_a_job_that_had_not_begun_may_be_tried_again() -> None:
    def script(asked: Job) -> Any:
        return say("hello", fault="crash")

    async def use(engine: SupervisedEngine) -> None:
        waiting = Steps()
        engine.submit(job(), waiting)
        await waiting.over.wait()
        assert waiting.errors == [Unavailable]

    supervised(lambda: ScriptedEngine(script), use)


def test_a_job_that_fails_alone_is_no_crash() -> None:
    opened = 0

    def open() -> ScriptedEngine:
        nonlocal opened
        opened += 1
        return ScriptedEngine(
            lambda asked: say("hello", fault="exception" if asked.n == 2 else None, fault_at=1)
        )

    async def use(engine: SupervisedEngine) -> None:
        failing = Steps(2)
        engine.submit(job(2), failing)
        await failing.over.wait()
        assert failing.errors == [EngineFailed, EngineFailed]
        assert "script" in str(failing[-1].error)
        assert await said(engine) == b"hello"
        assert opened == 1

    supervised(open, use)


def test_while_there_is_no_engine_jobs_are_refused() -> None:
    go, first = threading.Event(), True

    def open() -> ScriptedEngine:
        nonlocal first
        if not first:
            go.wait()
        fault: Any = "crash" if first else None
        first = False
        return ScriptedEngine(say("hello", fault=fault))

    async def use(engine: SupervisedEngine) -> None:
        crashed = Steps()
        engine.submit(job(), crashed)
        await crashed.over.wait()
        with pytest.raises(Unavailable):
            engine.submit(job(), Steps())
        with pytest.raises(Unavailable):
            await engine.check()
        assert engine.tokenizer.encode("a") == [97]
        go.set()
        await back(engine)
        assert await said(engine) == b"hello"

    supervised(open, use)


def test_an_engine_that_cannot_be_opened_is_lost_until_it_can(caplog: pytest.LogCaptureFixture) -> None:
    openings = 0

    def open() -> ScriptedEngine:
        nonlocal openings
        openings += 1
        if 1 < openings <= 6:
            raise ModelFileError("The file is gone.")
        return ScriptedEngine(say("hello", fault="crash" if openings == 1 else None))

    async def use(engine: SupervisedEngine) -> None:
        crashed = Steps()
        engine.submit(job(), crashed)
        await crashed.over.wait()
        with pytest.raises(EngineFailed):
            await back(engine)
        assert openings == 6
        while openings == 6:
            await asyncio.sleep(0.01)
        while (await asyncio.gather(engine.check(), return_exceptions=True))[0] is not None:
            await asyncio.sleep(0.01)
        assert await said(engine) == b"hello"

    supervised(open, use)
    assert "The file is gone" in caplog.text


def stuck_in(runner: FakeRunner, until: threading.Event, inside: threading.Event) -> None:
    def wait() -> None:
        inside.set()
        until.wait()

    runner.before_step = wait


def test_a_stuck_thread_is_given_up_and_what_it_says_later_is_not_heard() -> None:
    runners = [FakeRunner(), FakeRunner()]
    queue = list(runners)
    go, inside = threading.Event(), threading.Event()
    stuck_in(runners[0], go, inside)

    async def main() -> None:
        engine = SupervisedEngine(lambda: engine_over(queue.pop(0)), timeout=2 * INTERVAL_S)
        await engine.start()
        stuck = Steps()
        engine.submit(greedy([1, 2], 5), stuck)
        await stuck.over.wait()
        assert stuck.errors == [Unavailable]
        await back(engine)
        steps = [step async for step in engine.generate(greedy([1, 2], 5))]
        assert [id_ for step in steps for id_ in step.ids] == expected([1, 2], 5)
        go.set()
        while not runners[0].closed:
            await asyncio.sleep(0.01)
        assert len(stuck) == 1
        await engine.stop()

    asyncio.run(main())


class Slow(FakeRunner):
    """Its step takes ever so long, but can be seen to get on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    @property
    def pulse(self) -> int:
        self.seen += 1
        return self.seen


def test_a_long_step_that_gets_on_is_not_stuck() -> None:
    runner, go, inside = Slow(), threading.Event(), threading.Event()
    stuck_in(runner, go, inside)

    async def main() -> None:
        engine = SupervisedEngine(lambda: engine_over(runner), timeout=2 * INTERVAL_S)
        await engine.start()
        await engine.check()
        steps = Steps()
        engine.submit(greedy([1, 2], 5), steps)
        await asyncio.to_thread(inside.wait)
        looked = runner.seen
        while runner.seen < looked + 8:
            await asyncio.sleep(0.01)
        await engine.check()
        go.set()
        await steps.over.wait()
        assert [id_ for step in steps for id_ in step.ids] == expected([1, 2], 5)
        await engine.stop()

    asyncio.run(main())


def test_a_silent_engine_is_not_ready_long_before_it_is_given_up() -> None:
    runner, go, inside = FakeRunner(), threading.Event(), threading.Event()
    stuck_in(runner, go, inside)

    async def use(engine: SupervisedEngine) -> None:
        await engine.check()
        steps = Steps()
        engine.submit(greedy([1], 1), steps)
        try:
            with pytest.raises(Unavailable, match="has made no progress for"):
                while True:
                    await engine.check()
                    await asyncio.sleep(0.01)
        finally:
            go.set()
        await back(engine)
        await steps.over.wait()
        assert steps.errors == []

    supervised(lambda: engine_over(runner), use)


def test_vectors_that_are_awaited_end_with_the_engine() -> None:
    runners = [FakeRunner(), FakeRunner()]
    go, inside = threading.Event(), threading.Event()
    stuck_in(runners[0], go, inside)

    async def main() -> None:
        engine: Any = SupervisedEngine(lambda: engine_over(runners.pop(0)), timeout=2 * INTERVAL_S)
        await engine.start()
        engine.submit(greedy([1, 2], 5), Steps())
        with pytest.raises(EngineFailed):
            await engine.embed([[1]])
        await back(engine)
        assert await engine.embed([[1, 2]]) == [vector_of([1, 2])]
        await engine.stop()
        go.set()

    asyncio.run(main())


def test_it_can_do_what_its_engine_can() -> None:
    scripted = SupervisedEngine(lambda: ScriptedEngine(say("hi")))
    local = SupervisedEngine(lambda: engine_over(FakeRunner()))
    for engine in (scripted, local):
        assert isinstance(engine, CallbackEngine)
        assert isinstance(engine, LifecycleEngine)
    assert isinstance(scripted, PausableEngine)
    assert not isinstance(scripted, EmbeddingEngine)
    assert isinstance(local, OwnerAwareEngine)
    assert not isinstance(local, PausableEngine)


def test_media_are_placed_by_the_engine_that_is_there() -> None:
    picture = Media(kind="image", format="png", data=b"", digest="1")

    class SeeingEngine(ScriptedEngine):
        def media_token_ids(self, media: Media) -> list[int]:
            return [65]

    async def use(engine: Any) -> None:
        assert engine.media_token_ids(picture) == [65]
        engine._engine = None
        with pytest.raises(Unavailable):
            engine.media_token_ids(picture)

    supervised(lambda: SeeingEngine(say("hi")), use)


def test_the_version_of_the_weights_is_that_of_the_present_engine() -> None:
    async def use(engine: Any) -> None:
        await engine.pause()
        await engine.resume("v2")
        assert engine.weight_version == "v2"
        crashed = Steps()
        engine.submit(job(), crashed)
        await crashed.over.wait()
        await back(engine)
        assert engine.weight_version is None

    supervised(lambda: ScriptedEngine(say("hi", fault="crash")), use)


def test_after_five_failures_each_waits_longer() -> None:
    backoff = Backoff()
    backoff.opened(0.0)
    assert [backoff.failed(1.0 + n) for n in range(13)] == [0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    backoff.opened(100.0)
    assert backoff.failed(120.0) == 60
    backoff.opened(200.0)
    assert backoff.failed(260.0) == 0


def test_time_in_which_nothing_ran_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(ScriptedEngine):
        async def check(self) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        loop, watch = asyncio.get_running_loop(), EngineWatchdog(Silent(say("hi")))
        clock, away = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: clock() + away)

        async def leave() -> None:
            nonlocal away
            away = 3600.0

        await asyncio.gather(watch.poll(), leave())
        assert 0 < watch.silence <= 2 * INTERVAL_S
        watch.close()

    asyncio.run(main())


def test_a_local_engine_whose_runner_breaks_comes_back_and_nothing_of_it_is_kept() -> None:
    opened: list[weakref.ref[LocalEngine]] = []

    def break_down() -> None:
        raise ZeroDivisionError

    def open() -> LocalEngine:
        runner = FakeRunner()
        if not opened:
            runner.before_step = break_down
        engine = engine_over(runner)
        opened.append(weakref.ref(engine))
        return engine

    async def use(engine: SupervisedEngine) -> None:
        # Each answer that fails costs a rebuild of the runner, until there were too many of them.
        for _ in range(MOST_REBUILDS + 1):
            broken = Steps()
            engine.submit(greedy([1], 3), broken)
            await broken.over.wait()
        await back(engine)
        assert engine.faults.rebuilds == MOST_REBUILDS and engine.faults.restarts == 1
        steps = [step async for step in engine.generate(greedy([1, 2], 5))]
        assert len(steps) == 5
        assert opened[0]() is None

    supervised(open, use)
