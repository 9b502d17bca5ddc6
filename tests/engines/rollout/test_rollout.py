"""An executor that blocks, behind the engine: batches, cancelling, weights, and what it may get wrong."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import dragoman
from dragoman.engines.protocol import CallbackEngine, LifecycleEngine, ModelCard, PausableEngine
from dragoman.engines.rollout import HONOURED, RolloutEngine
from dragoman.engines.scripted import CHATML, END_ID, ByteTokenizer
from dragoman.engines.steps import seed_of
from dragoman.errors import EngineFailed, Unavailable
from dragoman.types import Job, Sampling, Step

CARD = ModelCard(name="policy", max_model_len=256, templates={"default": CHATML})
HI = [*b"hi", END_ID]


def answer(ids: Sequence[int] = HI, **fields: Any) -> dict[str, Any]:
    return {"token_ids": list(ids), "finish_reason": "stop", **fields}


class Executor:
    """Answers all prompts alike; with a gate, each call waits until it is let through."""

    def __init__(self, say: Callable[[int], Any] = lambda _: answer(), *, gated: bool = False) -> None:
        self.calls: list[tuple[list[Any], list[Any]]] = []
        self.entered = threading.Semaphore(0)
        self._gate = threading.Semaphore(0)
        self._gated = gated
        self._say = say

    def generate(self, prompts: list[Any], sampling_params: list[Any]) -> list[Any]:
        self.calls.append((prompts, sampling_params))
        self.entered.release()
        if self._gated:
            self._gate.acquire()
        return [self._say(index) for index in range(len(prompts))]

    def let_through(self) -> None:
        self._gate.release()

    async def wait_entered(self) -> None:
        await asyncio.to_thread(self.entered.acquire)


def engine_of(executor: Any, **options: Any) -> RolloutEngine:
    return RolloutEngine(executor, ByteTokenizer(), CARD, **options)


def job(id: str = "j", *, n: int = 1, **sampling: Any) -> Job:
    return Job(id=id, prompt=(1, 2, 3), n=n, sampling=Sampling(**{"max_tokens": 8, **sampling}))


async def steps_of(engine: RolloutEngine, asked: Job) -> list[Step]:
    return [step async for step in engine.generate(asked)]


def only_step(executor: Any, asked: Job | None = None, **options: Any) -> Step:
    async def main() -> Step:
        engine = engine_of(executor, **options)
        (step,) = await steps_of(engine, asked or job())
        await engine.stop()
        return step

    return asyncio.run(main())


def test_it_is_an_engine_of_every_kind_that_it_says() -> None:
    engine = engine_of(Executor())
    assert isinstance(engine, CallbackEngine)
    assert isinstance(engine, LifecycleEngine)
    assert isinstance(engine, PausableEngine)


def test_dicts_and_objects_will_do() -> None:
    nested = SimpleNamespace(outputs=[SimpleNamespace(**answer(stop_reason=None))])
    assert only_step(Executor(lambda _: nested)) == only_step(Executor()) == Step(HI, finish="stop")


def test_what_waits_together_goes_in_one_call() -> None:
    async def main() -> None:
        executor = Executor(gated=True)
        engine = engine_of(executor, batch=3)
        first = asyncio.create_task(steps_of(engine, job("first")))
        await executor.wait_entered()
        others = [asyncio.create_task(steps_of(engine, job(f"{n}"))) for n in range(4)]
        await asyncio.sleep(0)
        for _ in range(3):
            executor.let_through()
        await asyncio.gather(first, *others)
        assert [len(prompts) for prompts, _ in executor.calls] == [1, 3, 1]
        await engine.stop()

    asyncio.run(main())


def test_lower_priorities_go_first() -> None:
    async def main() -> None:
        executor = Executor(gated=True)
        engine = engine_of(executor, batch=1)
        tasks = [asyncio.create_task(steps_of(engine, job("first")))]
        await executor.wait_entered()
        for priority in (5, -5):
            later = Job(id="l", prompt=(priority + 10,), sampling=Sampling(max_tokens=4), priority=priority)
            tasks.append(asyncio.create_task(steps_of(engine, later)))
        await asyncio.sleep(0)
        for _ in range(3):
            executor.let_through()
        await asyncio.gather(*tasks)
        assert [prompts for prompts, _ in executor.calls[1:]] == [[[5]], [[15]]]
        await engine.stop()

    asyncio.run(main())


def test_a_cancelled_job_leaves_the_queue() -> None:
    async def main() -> None:
        executor = Executor(gated=True)
        engine = engine_of(executor, batch=8)
        first = asyncio.create_task(steps_of(engine, job("first")))
        await executor.wait_entered()
        steps: list[Step] = []
        handle = engine.submit(job("second", n=2), steps.append)
        handle.cancel()
        assert engine.live == 1
        last = asyncio.create_task(steps_of(engine, job("last")))
        await asyncio.sleep(0)
        executor.let_through()
        executor.let_through()
        await asyncio.gather(first, last)
        assert [len(prompts) for prompts, _ in executor.calls] == [1, 1]
        assert steps == []
        await engine.stop()

    asyncio.run(main())


def test_only_what_was_asked_and_is_honoured_is_handed_over() -> None:
    executor = Executor()
    asked = job(temperature=0.5, seed=7, top_k=3, logit_bias={5: 1.0}, stop_token_ids=frozenset({9}))
    only_step(executor, asked, honoured={"temperature", "seed", "stop_token_ids"})
    ((_, (params,)),) = executor.calls
    ends = sorted({9} | ByteTokenizer().end_ids)
    assert params == {"max_tokens": 8, "temperature": 0.5, "seed": 7, "stop_token_ids": ends}


def test_what_is_not_honoured_is_refused_by_name() -> None:
    engine = engine_of(Executor(), honoured=HONOURED - {"top_k"})
    body = {"messages": [{"role": "user", "content": "hi"}], "top_k": 3}
    with dragoman.background(engine, store="none") as url:
        reply = httpx.post(url + "/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "top_k")


def test_a_field_that_does_not_exist_cannot_be_honoured() -> None:
    with pytest.raises(ValueError, match="top_z"):
        engine_of(Executor(), honoured={"top_z"})


def test_continuations_have_seeds_of_their_own() -> None:
    async def main() -> None:
        executor = Executor()
        engine = engine_of(executor)
        steps = await steps_of(engine, job(n=3, seed=10))
        assert sorted(step.index for step in steps) == [0, 1, 2]
        seeds = [params["seed"] for _, all_params in executor.calls for params in all_params]
        assert seeds == [seed_of(10, index) for index in range(3)]
        await engine.stop()

    asyncio.run(main())


@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
def test_finish_reasons_are_those_of_the_executor(finish: str) -> None:
    assert only_step(Executor(lambda _: answer(finish_reason=finish))).finish == finish


def test_a_stop_id_is_told() -> None:
    executor = Executor(lambda _: answer([1, 9], stop_reason=9))
    assert only_step(executor, job(stop_token_ids=frozenset({9}))).stop_id == 9


def test_log_probabilities_come_in_either_form() -> None:
    numbers = Executor(lambda _: answer([5], logprobs=[-0.5]))
    rich = Executor(lambda _: answer([5], logprobs=[{5: SimpleNamespace(logprob=-0.5), 6: -0.1}]))
    (plain,) = only_step(numbers, job(logprobs=0)).logprobs or []
    (full,) = only_step(rich, job(logprobs=1)).logprobs or []
    assert (plain.id, plain.logprob) == (full.id, full.logprob) == (5, -0.5)
    assert full.top == ((6, -0.1),)


@pytest.mark.parametrize(
    "said",
    [
        {"token_ids": [1]},
        {"token_ids": [1], "finish_reason": "tired"},
        {"finish_reason": "stop"},
        {"token_ids": [1 << 20], "finish_reason": "stop"},
        {"token_ids": [1] * 9, "finish_reason": "length"},
        {"token_ids": ["one"], "finish_reason": "stop"},
        {"token_ids": [1], "finish_reason": "stop", "logprobs": [-1, -2]},
        {"token_ids": [1], "finish_reason": "stop", "logprobs": None},
        {"token_ids": [1], "finish_reason": "stop", "logprobs": [{2: -1.0}]},
        {"outputs": []},
        None,
    ],
)
def test_an_answer_that_is_amiss_is_an_error_and_never_a_good_one(said: Any) -> None:
    with pytest.raises(EngineFailed):
        only_step(Executor(lambda _: said), job(logprobs=0))


def test_one_bad_answer_does_not_spoil_its_neighbours() -> None:
    async def main() -> None:
        engine = engine_of(Executor(lambda index: None if index else answer()))
        steps: list[Step] = []
        done = asyncio.Event()

        def sink(step: Step) -> None:
            steps.append(step)
            if len(steps) == 2:
                done.set()

        engine.submit(job(n=2), sink)
        await done.wait()
        assert [step.finish for step in steps] == ["stop", "error"]
        await engine.stop()

    asyncio.run(main())


class BrokenExecutor:
    def generate(self, prompts: list[Any], sampling_params: list[Any]) -> list[Any]:
        raise RuntimeError("out of memory at 0xdeadbeef")


def test_an_executor_that_raises_fails_every_job_of_its_batch() -> None:
    async def main() -> None:
        engine = engine_of(BrokenExecutor())
        failed = await asyncio.gather(
            *(steps_of(engine, job(f"{n}")) for n in range(3)), return_exceptions=True
        )
        assert all(isinstance(error, EngineFailed) and "0x" not in error.message for error in failed)
        await engine.stop()

    asyncio.run(main())


def test_too_few_outputs_fail_the_batch() -> None:
    with pytest.raises(EngineFailed, match="0 outputs for 1"):
        only_step(SimpleNamespace(generate=lambda prompts, sampling_params: []))


def test_nothing_is_computed_while_weights_change() -> None:
    async def main() -> None:
        executor = Executor(gated=True)
        engine = engine_of(executor, weight_version="1")
        before = asyncio.create_task(steps_of(engine, job("before")))
        await executor.wait_entered()
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(0)
        assert not pausing.done()
        executor.let_through()
        await pausing
        during = asyncio.create_task(steps_of(engine, job("during")))
        await asyncio.sleep(0)
        assert len(executor.calls) == 1
        await engine.resume("2")
        executor.let_through()
        assert [(await before)[0].weight_version, (await during)[0].weight_version] == ["1", "2"]
        await engine.stop()

    asyncio.run(main())


def test_what_waits_when_it_stops_is_aborted() -> None:
    async def main() -> None:
        engine = engine_of(Executor())
        await engine.pause()
        waiting = asyncio.create_task(steps_of(engine, job()))
        await asyncio.sleep(0)
        await engine.stop()
        assert [step.finish for step in await waiting] == ["abort"]
        with pytest.raises(Unavailable):
            engine.submit(job(), lambda step: None)

    asyncio.run(main())


def test_a_stream_begins_while_the_executor_blocks() -> None:
    executor = Executor(gated=True)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with (
        dragoman.background(engine_of(executor), store="none") as url,
        httpx.stream("POST", url + "/v1/chat/completions", json=body) as reply,
    ):
        lines = reply.iter_lines()
        first = next(lines)
        assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
        executor.let_through()
        text = "".join(lines)
    assert '"content":"i"' in text
    assert text.endswith("[DONE]")
