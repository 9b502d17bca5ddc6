"""vLLM as an Engine, in its fastest form: steps by callback, straight from its core."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from dragoman.engines.steps import iterate
from dragoman.engines.vllm.core import Core
from dragoman.engines.vllm.faults import told
from dragoman.engines.vllm.model import VllmModel
from dragoman.engines.vllm.outputs import Continuation
from dragoman.engines.vllm.requests import Requests
from dragoman.errors import DragomanError, EngineFailed
from dragoman.types import FinishReason, Job, Sink, Step


class _Handle:
    __slots__ = ("_core", "_ids")

    def __init__(self, core: Core, ids: list[str]) -> None:
        self._core = core
        self._ids = ids

    def cancel(self, index: int | None = None) -> None:
        self._core.abort(self._ids if index is None else self._ids[index : index + 1])


class _Vector:
    """A prompt whose embedding is awaited."""

    def __init__(self) -> None:
        self.future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()

    def step(self, output: Any, _version: str | None) -> None:
        if output.pooling_output is None:
            self.end("error")
        elif not self.future.done():
            self.future.set_result(output.pooling_output.tolist())

    def sink(self, _step: Step) -> None:
        """There are no steps of it."""

    def end(self, _finish: FinishReason, error: DragomanError | None = None) -> None:
        if not self.future.done():
            self.future.set_exception(error or EngineFailed("The engine gave no embedding."))


class VllmEngine:
    """Around an `AsyncLLM` that was made outside of an event loop, so that nobody else reads its outputs.

    `adapters` are LoRA adapters: public name to folder. `open_vllm(model)` makes both.
    """

    def __init__(
        self, llm: Any, *, name: str | None = None, adapters: Mapping[str, str] | None = None
    ) -> None:
        self._model = VllmModel(llm, name, adapters or {})
        self._llm = llm
        self._core = Core(llm)
        self._requests = Requests(llm, self._model)
        self.card = self._model.card
        self.tokenizer = self._model.tokenizer
        self.weight_version: str | None = None

    def submit(self, job: Job, sink: Sink) -> _Handle:
        """Start a job; `sink` is called on the running event loop's thread."""
        self._core.start()
        requests = self._requests.of(job)
        takers = [Continuation(job, index, sink) for index in range(job.n)]
        self._core.add(requests, takers)
        return _Handle(self._core, [request.request_id for request in requests])

    def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        """Steps until every continuation has finished. Closing the iterator cancels the job."""
        return iterate(self, job)

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """What the model's pooler makes of each prompt, at length one."""
        requests = self._requests.embedding(prompts, await self._core.tasks())
        vectors = [_Vector() for _ in prompts]
        self._core.add(requests, vectors)
        try:
            return await asyncio.gather(*(vector.future for vector in vectors))
        finally:
            self._core.abort([request.request_id for request in requests])

    async def start(self) -> None:
        await self._core.tasks()
        await self._model.load_adapters(self._llm.engine_core.add_lora_async)

    async def stop(self) -> None:
        """End all jobs with finish "abort", and vLLM's processes. There is no second start."""
        await self._core.stop()
        await asyncio.to_thread(self._llm.shutdown)

    async def check(self) -> None:
        """Return when vLLM's core has answered; raise EngineFailed when it is dead."""
        await self._core.tasks()

    async def pause(self) -> None:
        """Return when no step is being computed, so that weights may be changed. Jobs wait meanwhile."""
        self._core.start()
        with told():
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def resume(self, weight_version: str | None = None) -> None:
        """Go on. What was computed with other weights is not used again, not even by the jobs at work."""
        core = self._llm.engine_core
        with told():
            if weight_version is not None:
                await core.reset_prefix_cache_async(reset_running_requests=True)
                await core.set_weight_version_async(weight_version)
                self.weight_version = weight_version
            await core.resume_scheduler_async()
