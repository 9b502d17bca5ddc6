"""An engine in a process of its own: what passes between the two, and what happens when one of them ends."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.engines.isolated import wire
from dragoman.engines.protocol import CallbackEngine, EmbeddingEngine, HeartbeatEngine, PausableEngine
from dragoman.engines.scripted import ByteTokenizer
from dragoman.errors import BadRequest, DragomanError, EngineFailed, ModelFileError, Unavailable
from dragoman.media import Media, MediaSpan
from dragoman.types import Job, Sampling, Step
from tests.engines.isolated.program import gone, opened
from tests.engines.supervised.test_supervised import Steps
from tests.support.wait import becomes


def job(salt: str = "", n: int = 1, **sampling: Any) -> Job:
    asked = Sampling(max_tokens=sampling.pop("max_tokens", 100), **sampling)
    return Job(id="1", prompt=(104, 105), sampling=asked, n=n, cache_salt=salt)


def isolated(use: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        engine = await asyncio.to_thread(opened)
        await engine.start()
        try:
            await use(engine)
        finally:
            await engine.stop()
        assert gone(engine.pid)

    asyncio.run(main())


def text(steps: list[Step]) -> str:
    return bytes(id_ for step in steps for id_ in step.ids if id_ < 256).decode()


async def ended(engine: Any, asked: Job) -> Steps:
    steps = Steps(asked.n)
    engine.submit(asked, steps)
    await steps.over.wait()
    return steps


def test_what_a_job_says_comes_over_whole() -> None:
    async def use(engine: Any) -> None:
        steps = [step async for step in engine.generate(job(logprobs=2, prompt_logprobs=1))]
        assert text(steps) == "hello"
        assert steps[0].logprobs is not None and len(steps[0].logprobs[0].top) == 2
        assert steps[0].prompt_logprobs is not None and steps[0].prompt_logprobs[0] is None
        assert (steps[0].cached_tokens, steps[-1].finish) == (0, "stop")

    isolated(use)


def test_it_can_do_what_the_engine_in_it_can() -> None:
    async def use(engine: Any) -> None:
        for kind in (CallbackEngine, HeartbeatEngine, EmbeddingEngine, PausableEngine):
            assert isinstance(engine, kind)
        assert not hasattr(engine, "score")
        await engine.check()
        await engine.pause()
        await engine.resume("v7")
        assert engine.weight_version == "v7"

    isolated(use)


def test_errors_keep_their_kind_and_no_foreign_words() -> None:
    async def use(engine: Any) -> None:
        with pytest.raises(BadRequest) as caught:
            await engine.embed([])
        assert (caught.value.message, caught.value.param, caught.value.code) == (
            "There is nothing to embed.",
            "input",
            "empty",
        )
        refused, broken = (await ended(engine, job("refused", n=2))), (await ended(engine, job("broken")))
        assert refused.errors == [BadRequest, BadRequest]
        assert broken.errors == [EngineFailed]
        assert "secret" not in str(broken[0].error)

    isolated(use)


def test_what_is_wrong_with_a_job_is_told_before_it_is_sent() -> None:
    async def use(engine: Any) -> None:
        for wrong in (
            {"allowed_token_ids": ()},
            {"logit_bias": {9999: 1.0}},
            {"stop_token_ids": frozenset({-1})},
        ):
            with pytest.raises(BadRequest):
                engine.submit(job(**wrong), Steps())

    isolated(use)


def test_a_job_that_is_cancelled_is_computed_no_more() -> None:
    async def use(engine: Any) -> None:
        begun = asyncio.Event()
        handle = engine.submit(job("endless", n=2, max_tokens=10**6), lambda step: begun.set())
        await begun.wait()
        handle.cancel(0)
        handle.cancel(1)
        handle.cancel()
        while await engine.embed([[1]]) != [[0.0]]:
            await asyncio.sleep(0.01)

    isolated(use)


def test_a_sink_that_raises_loses_only_its_own_job(caplog: pytest.LogCaptureFixture) -> None:
    async def use(engine: Any) -> None:
        def broken(step: Step) -> None:
            raise ValueError("my fault")

        engine.submit(job("endless", max_tokens=10**6), broken)
        assert text(await ended(engine, job())) == "hello"
        while await engine.embed([[1]]) != [[0.0]]:
            await asyncio.sleep(0.01)

    isolated(use)
    assert "my fault" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_the_end_of_the_process_is_told_to_everyone(number: signal.Signals) -> None:
    async def main() -> None:
        engine: Any = await asyncio.to_thread(opened)
        await engine.start()
        await engine.check()
        running = [Steps(2) for _ in range(3)]
        for steps in running:
            engine.submit(job("endless", n=2, max_tokens=10**6), steps)
        os.kill(engine.pid, number)
        for steps in running:
            await steps.over.wait()
            assert steps.errors == [EngineFailed, EngineFailed]
        expected = "SIGKILL" if number is signal.SIGSTOP else number.name
        for ask in (engine.check, lambda: engine.embed([[1]])):
            with pytest.raises(EngineFailed, match=expected):
                await ask()
        with pytest.raises(EngineFailed):
            engine.submit(job(), Steps())
        await engine.stop()

    asyncio.run(main())


def test_an_engine_that_dies_in_its_process_takes_it_along() -> None:
    async def main() -> None:
        engine: Any = await asyncio.to_thread(opened)
        await engine.start()
        steps = await ended(engine, job("crash"))
        assert (text(steps), steps.errors) == ("he", [EngineFailed])
        with pytest.raises(EngineFailed):
            while True:
                await engine.check()
        assert gone(engine.pid)
        await engine.stop()

    asyncio.run(main())


def test_stop_ends_jobs_with_abort() -> None:
    async def main() -> None:
        engine: Any = await asyncio.to_thread(opened)
        await engine.start()
        steps = Steps()
        engine.submit(job("endless", max_tokens=10**6), steps)
        await engine.check()
        await engine.stop()
        assert steps[-1].finish == "abort"
        with pytest.raises(Unavailable):
            engine.submit(job(), steps)

    asyncio.run(main())


def test_a_crash_while_loading_says_so() -> None:
    with pytest.raises(EngineFailed, match="was ended by SIGABRT while loading the model"):
        opened("abort")


def test_what_the_engine_says_of_its_opening_is_said_here() -> None:
    with pytest.raises(ModelFileError, match="There is no such file"):
        opened("refuse")


def test_a_process_that_says_something_else_is_ended() -> None:
    with pytest.raises(EngineFailed, match="Unexpected first message"):
        opened("babble")


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(EngineFailed, match="tokenizer"):
        opened("", ByteTokenizer(["more"]))


@pytest.mark.parametrize("before", [signal.SIGCONT, signal.SIGSTOP])
def test_it_dies_with_its_parent_even_when_it_is_stopped(before: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.engines.isolated.parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, before)
        assert not gone(pid)
        parent.kill()
    assert becomes(lambda: gone(pid))


def test_an_engine_that_was_never_started_leaves_nothing() -> None:
    engine = opened()
    assert isinstance(engine, object)
    with pytest.raises(DragomanError):
        engine.submit(job(), lambda step: None)
    asyncio.run(engine.stop())
    assert gone(engine.pid)


def shown(text: str, detail: str = "auto") -> Media:
    return Media(kind="image", format="png", data=text.encode(), digest=text, detail=detail)


def about(*pictures: Media) -> Job:
    return replace(job(), media=tuple(MediaSpan(each, at, 1) for at, each in enumerate(pictures)))


def test_a_picture_is_placed_and_shown_and_its_data_travel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[wire.Command] = []

    async def use(engine: Any) -> None:
        send = engine._send

        def note(order: wire.Command) -> None:
            sent.append(order)
            send(order)

        monkeypatch.setattr(engine, "_send", note)
        assert await asyncio.to_thread(engine.media_token_ids, shown("abc")) == [97, 98, 99]
        assert await asyncio.to_thread(engine.media_token_ids, shown("abc")) == [97, 98, 99]
        for pictures in ([shown("abc")], [shown("abc"), shown("d")]):
            steps = await ended(engine, about(*pictures))
            expected = " ".join(f"{at}:{each.digest}" for at, each in enumerate(pictures))
            assert text(steps) == expected

    isolated(use)
    assert [order.digest for order in sent if isinstance(order, wire.MediaUpload)] == ["abc", "d"]


def test_what_is_shown_is_kept_up_to_a_bound() -> None:
    async def use(engine: Any) -> None:
        engine._shown = wire.MediaMirror(4)
        for _ in range(2):
            for name in ("abc", "def", "more than there is room for"):
                assert bytes(await asyncio.to_thread(engine.media_token_ids, shown(name))).decode() == name
                assert text(await ended(engine, about(shown(name)))) == f"0:{name}"
        assert sum(engine._shown._kept.values()) <= 4

    isolated(use)


def test_what_place_refuses_is_told_as_it_is() -> None:
    async def use(engine: Any) -> None:
        with pytest.raises(BadRequest) as caught:
            await asyncio.to_thread(engine.media_token_ids, shown("abc", detail="low"))
        assert caught.value.code == "unseen"
        with pytest.raises(EngineFailed):
            engine.media_token_ids(shown("abc"))

    isolated(use)
