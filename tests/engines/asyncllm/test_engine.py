"""Requests from their beginning to every end they can have."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from dragoman.engines.asyncllm import AsyncLLMEngine
from dragoman.engines.protocol import Engine
from dragoman.errors import BadRequest, DragomanError, EngineFailed, Overloaded, Unavailable
from dragoman.types import Job, Sampling, Step
from tests.support.fake_asyncllm import AsyncEngineBase, DuckEngine, FakeAsyncLLM, Manner
from tests.support.fake_sglang import FakeSglang
from tests.support.turns import answers_of, events_of, spec

JOB = Job(id="job", prompt=(1, 2), sampling=Sampling(max_tokens=99))


def steps_of(engine: AsyncLLMEngine) -> AsyncGenerator[Step, None]:
    return cast("AsyncGenerator[Step, None]", engine.generate(JOB))


@pytest.mark.parametrize("make", [FakeAsyncLLM, DuckEngine, FakeSglang])
@pytest.mark.parametrize(("whole", "ahead"), [(True, 0), (True, 2), (False, 0)])
@pytest.mark.parametrize("cuts", [(), (3, 1), (99,)])
def test_every_shape_of_the_contract_gives_the_same_answer(
    make: Any, whole: bool, ahead: int, cuts: tuple[int, ...]
) -> None:
    text = "Grüße, 世界"
    manner = Manner(ids=(*text.encode(), 258), whole_ids=whole, whole_logprobs=whole, ahead=ahead, cuts=cuts)
    engine = AsyncLLMEngine(make(manner))
    [answer] = answers_of(engine, spec(sampling=Sampling(max_tokens=99, logprobs=0)))
    assert (answer.text, answer.finish) == (text, "stop")
    assert answer.ids == [entry.id for entry in answer.logprobs] == list(manner.ids)


def test_it_is_an_engine() -> None:
    assert isinstance(AsyncLLMEngine(FakeAsyncLLM()), Engine)


def leave_after_one_step(llm: AsyncEngineBase, engine: AsyncLLMEngine) -> None:
    async def run() -> None:
        steps = steps_of(engine)
        await anext(steps)
        assert llm.live == {"job."}
        await steps.aclose()
        assert not llm.live

    asyncio.run(run())


@pytest.mark.parametrize("closing_aborts", [True, False])
def test_leaving_aborts_the_request(closing_aborts: bool) -> None:
    llm = FakeAsyncLLM(Manner(closing_aborts=closing_aborts))
    leave_after_one_step(llm, AsyncLLMEngine(llm))
    assert llm.aborted == ["job."]


def test_leaving_aborts_through_the_manager() -> None:
    outer = FakeSglang(Manner(closing_aborts=False))
    leave_after_one_step(outer.tokenizer_manager, AsyncLLMEngine(outer))


def test_an_abort_is_of_one_choice_alone() -> None:
    """Although engines go by the beginning of an id, and "1" is the beginning of "11"."""
    texts = iter([b"X" if number == 1 else b"go on" for number in range(12)])
    llm = FakeAsyncLLM(lambda _: Manner(ids=(*next(texts), 258)))
    answers = answers_of(AsyncLLMEngine(llm), spec(n=12, stop=("X",)))
    assert [answer.text for answer in answers] == ["" if number == 1 else "go on" for number in range(12)]


def test_an_engine_without_abort_is_closed() -> None:
    llm = FakeAsyncLLM()
    llm.abort_request = None  # type: ignore[assignment, method-assign]
    leave_after_one_step(llm, AsyncLLMEngine(llm))


def test_an_abort_may_be_awaited_and_may_fail() -> None:
    class Late(FakeAsyncLLM):
        async def abort_request(self, rid: str) -> None:  # type: ignore[override]
            await asyncio.sleep(0)
            super().abort_request(rid)
            raise RuntimeError("the socket is gone")

    llm = Late(Manner(closing_aborts=False))
    leave_after_one_step(llm, AsyncLLMEngine(llm))


def test_cancelling_while_the_engine_computes_aborts_the_request() -> None:
    llm = FakeAsyncLLM(Manner(hang_at=0, closing_aborts=False))
    engine = AsyncLLMEngine(llm)

    async def run() -> None:
        task = asyncio.create_task(anext(steps_of(engine)))
        while not llm.live:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert not llm.live


def test_what_has_come_to_its_end_is_not_aborted() -> None:
    llm = FakeAsyncLLM()
    answers_of(AsyncLLMEngine(llm), spec())
    assert (llm.live, llm.aborted) == (set(), [])


def test_an_engine_comes_to_the_end_of_its_code() -> None:
    class Tidy(DuckEngine):
        tidied = False

        async def generate_request(self, obj):  # type: ignore[no-untyped-def]
            async for output in self.run(obj):
                yield output
            self.tidied = True

    llm = Tidy()

    async def run() -> None:
        async for step in (steps := steps_of(AsyncLLMEngine(llm))):
            if step.finish:
                await steps.aclose()

    asyncio.run(run())
    assert llm.tidied


def decoding_error() -> Exception:
    """One that a library raises, with whatever it was about."""
    try:
        json.loads("{secret")
    except ValueError as error:
        return error
    raise AssertionError


class HttpException(Exception):
    """As HTTP frameworks have it."""

    status_code = 503
    detail = "secret"


@pytest.mark.parametrize("fault_at", [0, 2])
@pytest.mark.parametrize(
    ("fault", "before", "later"),
    [
        (decoding_error(), BadRequest, EngineFailed),
        (RuntimeError("secret"), EngineFailed, EngineFailed),
        (HttpException(), Unavailable, Unavailable),
    ],
)
def test_exceptions_become_errors_that_keep_their_words_to_themselves(
    fault: Exception, before: type, later: type, fault_at: int
) -> None:
    llm = FakeAsyncLLM(Manner(fault=fault, fault_at=fault_at))
    *events, last = events_of(AsyncLLMEngine(llm), spec())
    assert (last.finish, type(last.error)) == ("error", later if fault_at else before)
    assert "secret" not in str(last.error)
    assert len("".join(event.text for event in events)) == fault_at
    assert not llm.live


@pytest.mark.parametrize(
    ("status", "error"), [(400, BadRequest), (429, Overloaded), (503, Unavailable), (None, Unavailable)]
)
def test_an_abort_by_the_engine_is_an_error(status: int | None, error: type[DragomanError]) -> None:
    finish = {"type": "abort", "message": "No.", "status_code": status}
    with pytest.raises(error):
        answers_of(AsyncLLMEngine(FakeAsyncLLM(Manner(finish=finish))), spec())


def test_an_engine_that_falls_silent_in_the_middle_is_no_stop() -> None:
    class Short(DuckEngine):
        async def generate_request(self, obj):  # type: ignore[no-untyped-def]
            yield {"text": "a", "output_ids": [97], "meta_info": {"finish_reason": None}}

    with pytest.raises(EngineFailed):
        answers_of(AsyncLLMEngine(Short()), spec())


def test_steps_say_which_weights_computed_them() -> None:
    async def run() -> list[str | None]:
        engine = AsyncLLMEngine(FakeAsyncLLM(Manner(weight_version="v7")))
        return [step.weight_version async for step in engine.generate(JOB)]

    assert set(asyncio.run(run())) == {"v7"}
