"""What fails in one answer harms no other: a table of failures and adapters, each with neighbours at work.

The adapter over transformers has the same in its own tests, which need torch; that over vLLM in
`tests/engines/vllm`, over a real vLLM.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import pytest

import dragoman
from dragoman.engines.asyncllm import AsyncLLMEngine
from dragoman.engines.isolated import IsolatedEngine
from dragoman.engines.protocol import Engine, LifecycleEngine, ModelCard
from dragoman.engines.rollout import RolloutEngine
from dragoman.engines.scripted import CHATML, END_ID, ByteTokenizer, ScriptedEngine, say
from dragoman.engines.validate import start_job
from dragoman.errors import DragomanError
from dragoman.types import Job, Sampling, Step
from tests.engines.isolated.program import opened
from tests.engines.local.scripted import engine_over, expected
from tests.engines.local.support import FakeRunner
from tests.engines.remote.support import remote_of, serving
from tests.support.fake_asyncllm import FakeAsyncLLM, Manner

GOOD, AT_FIRST, LATER = 1, 2, 3
"""First ids of prompts: what is to become of each."""
HELLO = (*b"hello", END_ID)
CARD = ModelCard(name="fails", max_model_len=256, templates={"default": CHATML})
SECRET = "secret 0xdeadbeef"
Opened: TypeAlias = AbstractAsyncContextManager[Any]


def script_of(job: Job) -> Any:
    if job.prompt[0] == GOOD:
        return say("hello")
    return say("hello", fault="exception", fault_at=0 if job.prompt[0] == AT_FIRST else 2)


class Generating:
    """An engine with `generate` alone, as people write it first."""

    card, tokenizer = CARD, ByteTokenizer()

    async def generate(self, job: Job) -> AsyncIterator[Step]:
        for index, id_ in enumerate(HELLO):
            if (job.prompt[0] == AT_FIRST and index == 0) or (job.prompt[0] == LATER and index == 2):
                raise RuntimeError(SECRET)
            await asyncio.sleep(0)
            yield Step([id_], finish="stop" if id_ == END_ID else None)


class Executor:
    """A blocking batch call, which fails as a whole: so each call has one prompt here."""

    def generate(self, prompts: list[Any], sampling_params: list[Any]) -> list[Any]:
        if prompts[0][0] != GOOD:
            raise RuntimeError(SECRET)
        return [{"token_ids": list(HELLO), "finish_reason": "stop"} for _ in prompts]


def local() -> Any:
    """The embedded engine: each step fails in which such a prompt begins."""
    runner = FakeRunner(slots=4, context=64, rows=64)
    step = runner.step

    def failing(rows: Any) -> Any:
        logits = step(rows)
        firsts = {id_ for id_, index in zip(rows.tokens, rows.positions, strict=True) if not index}
        if firsts & {AT_FIRST, LATER}:
            raise RuntimeError(SECRET)
        return logits

    runner.step = failing  # type: ignore[method-assign]
    return engine_over(runner)


def manner_of(request: Any) -> Manner:
    first = request.input_ids[0]
    fault = None if first == GOOD else RuntimeError(SECRET)
    return Manner(ids=HELLO, fault=fault, fault_at=0 if first == AT_FIRST else 2)


@asynccontextmanager
async def started(engine: Any) -> AsyncIterator[Any]:
    if isinstance(engine, LifecycleEngine):
        await engine.start()
    try:
        yield engine
    finally:
        if isinstance(engine, LifecycleEngine):
            await engine.stop()


@asynccontextmanager
async def remote() -> AsyncIterator[Any]:
    with serving(ScriptedEngine(script_of)) as urls:
        async with remote_of(urls) as engine:
            yield engine


@asynccontextmanager
async def isolated() -> AsyncIterator[IsolatedEngine]:
    engine = await asyncio.to_thread(opened)
    async with started(engine):
        yield engine


ADAPTERS: dict[str, Callable[[], Opened]] = {
    "local": lambda: started(local()),
    "generate": lambda: started(Generating()),
    "rollout": lambda: started(RolloutEngine(Executor(), ByteTokenizer(), CARD, batch=1)),
    "asyncllm": lambda: started(AsyncLLMEngine(FakeAsyncLLM(manner_of))),
    "remote": remote,
    "scripted": lambda: started(ScriptedEngine(script_of)),
    "supervised": lambda: started(dragoman.SupervisedEngine(lambda: ScriptedEngine(script_of))),
    "isolated": isolated,
}


def job(first: int, name: str, number: int = 0) -> Job:
    salt = "broken" if name == "isolated" and first != GOOD else ""
    sampling = Sampling(max_tokens=6, temperature=0.0)
    return Job(id=f"{first}-{number}", prompt=(first, 10 + number), sampling=sampling, cache_salt=salt)


class Listener:
    """The sink of a job, as the layer above engines starts it."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self.ids: list[int] = []
        self.error: Exception | None = None
        self.begun, self.over = asyncio.Event(), asyncio.Event()
        self.handle = start_job(engine, job, self.take)

    def take(self, step: Step) -> None:
        self.begun.set()
        self.ids += step.ids
        if step.finish is not None:
            self.error = step.error
            self.over.set()


async def answer(engine: Engine, job: Job) -> list[int] | Exception:
    listener = Listener(engine, job)
    await listener.over.wait()
    return listener.error or listener.ids


def good_answer(name: str, number: int) -> list[int]:
    return expected([GOOD, 10 + number], 6) if name == "local" else list(HELLO)


# An upstream that answers with 5xx three times is taken for down, see tests/engines/remote.
TABLE = [
    (name, first) for name in ADAPTERS for first in (AT_FIRST, LATER) if (name, first) != ("remote", AT_FIRST)
]


@pytest.mark.parametrize(("name", "first"), TABLE)
def test_an_answer_that_fails_ends_alone(name: str, first: int) -> None:
    async def main() -> None:
        async with ADAPTERS[name]() as engine:
            jobs = [job(GOOD, name, 0), job(first, name, 1), job(GOOD, name, 2), job(GOOD, name, 3)]
            async with asyncio.timeout(30):
                one, failed, *others = await asyncio.gather(*(answer(engine, each) for each in jobs))
            assert [one, *others] == [good_answer(name, number) for number in (0, 2, 3)]
            assert isinstance(failed, DragomanError)
            assert "secret" not in failed.message
            if isinstance(engine, LifecycleEngine):
                await engine.check()
            assert await answer(engine, job(GOOD, name, 4)) == good_answer(name, 4), "it is as good as new"

    asyncio.run(main())


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_answer_that_is_left_harms_no_other(name: str) -> None:
    async def main() -> None:
        async with ADAPTERS[name]() as engine:
            for number in range(20):
                leaving = Listener(engine, job(GOOD, name, number))
                staying = asyncio.ensure_future(answer(engine, job(GOOD, name, number + 1)))
                if number % 2:
                    await leaving.begun.wait()
                leaving.handle.cancel()
                async with asyncio.timeout(30):
                    assert await staying == good_answer(name, number + 1)

    asyncio.run(main())
