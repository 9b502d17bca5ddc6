"""The way between vLLM's core and the sinks, with a core that says what it is told to. vLLM is not needed."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dragoman.engines.steps import MOST_APART
from dragoman.engines.vllm.core_client import MOST_UNSENT, CoreClient
from dragoman.engines.vllm.outputs import CoreContinuation, error_of
from dragoman.errors import DragomanError, EngineFailed
from dragoman.types import Job, Sampling, Sink, Step


def output(id: str = "a", ids: tuple[int, ...] = (1,), **more: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "request_id": id,
        "new_token_ids": list(ids),
        "new_logprobs": None,
        "new_prompt_logprobs_tensors": None,
        "finish_reason": None,
        "stop_reason": None,
        "prefill_stats": None,
    }
    return SimpleNamespace(**fields | more)


def rows(*ids: tuple[int, ...]) -> tuple[Any, Any]:
    """Ids, and log probabilities that fall with their place in the row."""
    return np.array(ids), -np.arange(1.0, 1 + np.size(ids)).reshape(len(ids), -1)


class Client:
    """A core client that keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.outputs_queue: asyncio.Queue[Any] | None = None
        self.refused: str | None = None

    def say(self, *outputs: Any) -> None:
        self.outputs.put_nowait(SimpleNamespace(outputs=outputs, weight_version="default"))

    async def get_output_async(self) -> Any:
        value = await self.outputs.get()
        if isinstance(value, Exception):
            raise value
        return value

    async def add_request_async(self, request: Any) -> None:
        if request.request_id == self.refused:
            raise RuntimeError("no")
        self.sent.append(("add", request.request_id))

    async def abort_requests_async(self, ids: list[str]) -> None:
        self.sent.append(("abort", ids))

    async def get_supported_tasks_async(self) -> list[str]:
        await asyncio.get_running_loop().create_future()
        return []


def job(**sampling: Any) -> Job:
    return Job(id="a", prompt=(1, 2, 3), sampling=Sampling(max_tokens=9, **sampling))


def with_core(test: Callable[[CoreClient, Client], Awaitable[None]]) -> None:
    async def run() -> None:
        client = Client()
        core = CoreClient(SimpleNamespace(engine_core=client))
        await test(core, client)
        await core.stop()

    asyncio.run(run())


def add(core: CoreClient, id: str, sink: Sink) -> None:
    core.add([SimpleNamespace(request_id=id)], [CoreContinuation(job(), 0, sink)])


async def settled() -> None:
    """Everything that is ready has run."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_cancelled_job_hears_no_more_and_its_abort_comes_after_it() -> None:
    async def run(core: CoreClient, client: Client) -> None:
        steps: list[Step] = []
        add(core, "a", steps.append)
        await settled()
        core.abort(["a"])
        core.abort(["a"])
        client.say(output("a"))
        await settled()
        assert steps == []
        assert client.sent == [("add", "a"), ("abort", ["a"])]

    with_core(run)


def test_a_job_that_is_cancelled_at_once_is_not_sent() -> None:
    async def run(core: CoreClient, client: Client) -> None:
        add(core, "a", lambda step: None)
        add(core, "b", lambda step: None)
        core.abort(["a"])
        await settled()
        assert client.sent == [("add", "b")]

    with_core(run)


def test_jobs_that_come_together_are_sent_in_their_order() -> None:
    async def run(core: CoreClient, client: Client) -> None:
        ids = [str(number) for number in range(MOST_UNSENT + 3)]
        for id in ids:
            add(core, id, lambda step: None)
        # Of many, some are sent before the last has come.
        assert len(client.sent) == MOST_UNSENT
        await settled()
        assert client.sent == [("add", id) for id in ids]

    with_core(run)


def test_a_job_that_cannot_be_sent_costs_the_others_nothing() -> None:
    async def run(core: CoreClient, client: Client) -> None:
        steps: list[Step] = []
        client.refused = "a"
        add(core, "a", steps.append)
        add(core, "b", steps.append)
        await settled()
        assert [step.finish for step in steps] == ["error"]
        assert client.sent == [("add", "b")]

    with_core(run)


def test_a_job_that_is_over_is_not_aborted() -> None:
    async def run(core: CoreClient, client: Client) -> None:
        add(core, "a", lambda step: None)
        await settled()
        client.say(output("a", finish_reason="length"))
        await settled()
        core.abort(["a"])
        await settled()
        assert client.sent == [("add", "a")]

    with_core(run)


def test_a_sink_that_raises_costs_only_its_own_job() -> None:
    async def run(core: CoreClient, client: Client) -> None:
        steps: list[Step] = []

        def broken(step: Step) -> None:
            raise RuntimeError

        add(core, "a", broken)
        add(core, "b", steps.append)
        await settled()
        client.say(output("a"), output("b"))
        client.say(output("a"), output("b"))
        await settled()
        assert len(steps) == 2
        assert ("abort", ["a"]) in client.sent

    with_core(run)


@pytest.mark.parametrize(
    ("waiting", "told"),
    [
        (MOST_APART, [([1, 2], None), *(([0], None) for _ in range(MOST_APART - 2)), ([4], "length")]),
        (MOST_APART + 1, [([1, 2, *[0] * (MOST_APART - 1), 4], "length")]),
    ],
)
def test_steps_stay_apart_until_too_many_wait(waiting: int, told: list[tuple[list[int], str | None]]) -> None:
    async def run(core: CoreClient, client: Client) -> None:
        steps: dict[str, list[Step]] = {"a": [], "b": []}
        client.outputs_queue = client.outputs
        add(core, "a", steps["a"].append)
        add(core, "b", steps["b"].append)
        client.say(output("a", (1, 2)), output("b", (7,)))
        for _ in range(waiting - 2):
            client.say(output("a", (0,)))
        client.say(output("a", (4,), finish_reason="length"))
        await settled()
        assert [(step.ids, step.finish) for step in steps["a"]] == told
        assert [(step.ids, step.finish) for step in steps["b"]] == [([7], None)]

    with_core(run)


def test_an_output_that_cannot_be_read_ends_its_own_job_only() -> None:
    async def run(core: CoreClient, client: Client) -> None:
        ends: dict[str, list[str | None]] = {"a": [], "b": []}
        add(core, "a", lambda step: ends["a"].append(step.finish))
        add(core, "b", lambda step: ends["b"].append(step.finish))
        await settled()
        client.say(output("a", new_logprobs="?"), output("b"))
        await settled()
        assert ends == {"a": ["error"], "b": [None]}
        assert ("abort", ["a"]) in client.sent

    with_core(run)


def test_the_death_of_the_core_ends_every_job_and_every_question() -> None:
    async def run(core: CoreClient, client: Client) -> None:
        steps: list[Step] = []
        add(core, "a", steps.append)
        add(core, "b", steps.append)
        asked = asyncio.ensure_future(core.tasks())
        await settled()
        client.outputs.put_nowait(RuntimeError("dead"))
        with pytest.raises(EngineFailed):
            await asked
        assert [(step.finish, type(step.error)) for step in steps] == [("error", EngineFailed)] * 2
        with pytest.raises(EngineFailed):
            add(core, "c", steps.append)

    with_core(run)


def test_stopping_ends_what_runs_as_aborted() -> None:
    async def run(core: CoreClient, client: Client) -> None:
        steps: list[Step] = []
        add(core, "a", steps.append)
        await core.stop()
        assert [step.finish for step in steps] == ["abort"]

    with_core(run)


def steps_of(asked: Job, *outputs: Any, index: int = 0) -> list[Step]:
    continuation = CoreContinuation(asked, index, lambda step: None)
    steps = [continuation.step(each, None) for each in outputs]
    return [step for step in steps if step is not None]


def test_a_prompt_that_is_computed_in_pieces_is_told_of_once() -> None:
    pieces = [rows((2, 9)), rows((3, 8))]
    steps = steps_of(
        job(prompt_logprobs=1),
        output(ids=(), new_prompt_logprobs_tensors=pieces[0]),
        output(new_prompt_logprobs_tensors=pieces[1], prefill_stats=SimpleNamespace(num_cached_tokens=2)),
        output(),
    )
    assert [step.ids for step in steps] == [[1], [1]]
    logprobs = steps[0].prompt_logprobs
    assert logprobs is not None and [entry and (entry.id, entry.top[0][0]) for entry in logprobs] == [
        None,
        (2, 9),
        (3, 8),
    ]
    assert [step.cached_tokens for step in steps] == [2, None]
    assert steps[1].prompt_logprobs is None


def test_only_the_first_continuation_tells_of_the_prompt() -> None:
    step = steps_of(job(prompt_logprobs=1), output(), index=1)[0]
    assert (step.index, step.cached_tokens, step.prompt_logprobs) == (1, None, None)


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_as_many_alternatives_are_told_as_were_asked_for(asked: int) -> None:
    # Somebody else in the same step asked for more.
    step = steps_of(job(logprobs=asked), output(new_logprobs=rows((7, 7, 5, 6))))[0]
    assert step.logprobs is not None
    assert (step.logprobs[0].id, step.logprobs[0].logprob) == (7, -1.0)
    assert [id_ for id_, _ in step.logprobs[0].top] == [7, 5, 6][:asked]


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("stop", "stop"), ("length", "length"), ("abort", "abort"), ("error", "error"), ("repetition", "error")],
)
def test_no_ending_is_taken_for_a_good_one(reason: str, finish: str) -> None:
    step = steps_of(job(), output(finish_reason=reason))[0]
    assert step.finish == finish
    assert (step.error is not None) == (finish == "error")


def test_a_stop_id_is_told_of_if_the_client_named_it() -> None:
    ended = output(ids=(5,), finish_reason="stop", stop_reason=5)
    assert steps_of(job(stop_token_ids=frozenset({5})), ended)[0].stop_id == 5
    assert steps_of(job(), ended)[0].stop_id is None


class VLLMError(Exception): ...


class VLLMClientError(VLLMError): ...


class VLLMValidationError(VLLMClientError):
    parameter = "top_p"


class VLLMNotFoundError(VLLMClientError): ...


class GracefulHTTPError(VLLMError): ...


class EngineDeadError(VLLMError): ...


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (VLLMValidationError("top_p must be in (0, 1], got 7."), 400, "top_p"),
        (ValueError("min_p must be in [0, 1]."), 400, None),
        (VLLMNotFoundError("secret path"), 404, "model"),
        (GracefulHTTPError("secret queue"), 503, None),
        (EngineDeadError("secret stack"), 500, None),
        (KeyError("secret key"), 500, None),
    ],
)
def test_errors_have_the_status_that_they_deserve(error: Exception, status: int, param: str | None) -> None:
    dragoman_error: DragomanError = error_of(error)
    assert (dragoman_error.status, dragoman_error.param) == (status, param)
    assert "secret" not in dragoman_error.message
