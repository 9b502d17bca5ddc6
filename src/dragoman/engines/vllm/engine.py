"""vLLM as an Engine: directly from its core, or through its public API if the core cannot be read."""

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from dragoman.engines.steps import iterate
from dragoman.engines.vllm.core_client import CoreClient, lacking
from dragoman.engines.vllm.options import VllmOptions, engine_args
from dragoman.engines.vllm.outputs import FAILED, CoreContinuation, finish_of, telling_errors
from dragoman.engines.vllm.requests import RequestBuilder, VllmModel, prompt_of
from dragoman.errors import DragomanError, EngineFailed, ModelFileError
from dragoman.media import Media
from dragoman.types import FinishReason, Job, Sink, Step, TokenLogprob

# The engine over the public API, `AsyncLLM.generate`.


class VllmAsyncLLMEngine:
    """Engine around any `AsyncLLM`, also one that other code uses. It needs a task and a queue for each
    answer.
    """

    def __init__(
        self, llm: Any, *, name: str | None = None, adapters: Mapping[str, str] | None = None
    ) -> None:
        self._model = VllmModel(llm, name, adapters or {})
        self._llm = llm
        self.card = self._model.card
        self.tokenizer = self._model.tokenizer

    async def generate(self, job: Job) -> AsyncIterator[Step]:
        """Yield the steps of one continuation. Closing the iterator aborts the request."""
        params = self._model.sampling_params(job)
        prompt = (
            self._model.prompt(job) if not job.media else await asyncio.to_thread(self._model.prompt, job)
        )
        with telling_errors():
            outputs = self._llm.generate(
                prompt,
                params,
                job.id,
                lora_request=self._model.adapter(job),
                priority=job.priority,
                trace_headers=job.trace_headers,
            )
            first = True
            async with aclosing(outputs):
                async for output in outputs:
                    yield _step(job, output, first)
                    first = False

    def media_token_ids(self, media: Media) -> Sequence[int]:
        """Return the ids that vLLM's processor puts into a prompt for a medium."""
        return self._model.media_token_ids(media)

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the model's pooled vector of each prompt, normalized to length one."""
        params = self._model.pooling_params()
        return await asyncio.gather(
            *(self._vector(f"embed-{n}", prompt, params) for n, prompt in enumerate(prompts))
        )

    async def start(self) -> None:
        await self._model.load_adapters(self._llm.add_lora)

    async def load_adapter(self, name: str, path: str) -> None:
        await self._model.load_adapter(name, path, self._llm.add_lora)

    async def unload_adapter(self, name: str) -> None:
        await self._model.unload_adapter(name, self._llm.remove_lora)

    async def stop(self) -> None:
        """End vLLM's processes, and with them all jobs. The engine cannot be started again."""
        self._model.close()
        await asyncio.to_thread(self._llm.shutdown)

    async def check(self) -> None:
        """Raise EngineFailed when vLLM reports that it is dead."""
        with telling_errors():
            await self._llm.check_health()

    async def _vector(self, id: str, prompt: Sequence[int], params: Any) -> list[float]:
        with telling_errors():
            async for output in self._llm.encode(prompt_of(prompt, ""), params, id):
                vector: list[float] = output.outputs.data.tolist()
                return vector
        raise EngineFailed("The engine returned no embedding.")


def _step(job: Job, output: Any, first: bool) -> Step:
    result = output.outputs[0]
    step = Step(list(result.token_ids))
    if result.logprobs is not None:
        step.logprobs = [
            _make_logprob(id_, row, job.sampling.logprobs or 0)
            for id_, row in zip(step.ids, result.logprobs, strict=True)
        ]
    if first:
        step.cached_tokens = output.num_cached_tokens or 0
        if output.prompt_logprobs is not None:
            step.prompt_logprobs = [
                None if row is None else _make_logprob(id_, row, job.sampling.prompt_logprobs or 0)
                for id_, row in zip(job.prompt, output.prompt_logprobs, strict=True)
            ]
    if result.finish_reason is not None:
        step.finish = finish_of(result.finish_reason)
        step.error = EngineFailed(FAILED) if step.finish == "error" else None
        step.stop_id = result.stop_reason if result.stop_reason in job.sampling.stop_token_ids else None
    return step


def _make_logprob(id_: int, row: Mapping[int, Any], top: int) -> TokenLogprob:
    """Convert vLLM's entries, which always include the sampled id besides the likeliest."""
    likeliest = sorted(row.items(), key=lambda entry: entry[1].rank)[:top]
    return TokenLogprob(id_, row[id_].logprob, tuple((other, entry.logprob) for other, entry in likeliest))


# The engine in its fastest form: steps by callback, directly from the core.


class _VllmHandle:
    """Handle of a job; its requests may not be sent yet, while its media are processed."""

    __slots__ = ("_core", "_ids", "open")

    def __init__(self, core: CoreClient, n: int) -> None:
        self._core = core
        self._ids: list[str] = []
        self.open = set(range(n))

    def begin(self, requests: list[Any], takers: list[CoreContinuation]) -> None:
        """Send the requests of continuations that were not cancelled meanwhile."""
        self._ids = [request.request_id for request in requests]
        wanted = sorted(self.open)
        if wanted:
            self._core.add([requests[index] for index in wanted], [takers[index] for index in wanted])

    def cancel(self, index: int | None = None) -> None:
        self.open -= set(self.open) if index is None else {index}
        self._core.abort(self._ids if index is None else self._ids[index : index + 1])


class _PendingEmbedding:
    """A prompt whose embedding is pending."""

    def __init__(self) -> None:
        self.future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()

    def step(self, output: Any, _version: str | None) -> None:
        if output.pooling_output is None:
            self.end("error")
        elif not self.future.done():
            self.future.set_result(output.pooling_output.tolist())

    def sink(self, _step: Step) -> None:
        """No effect: an embedding has no steps."""

    def end(self, _finish: FinishReason, error: DragomanError | None = None) -> None:
        if not self.future.done():
            self.future.set_exception(error or EngineFailed("The engine returned no embedding."))


class VllmEngine:
    """Engine around an `AsyncLLM` created outside of an event loop, so that no other code reads its outputs.

    `adapters` are LoRA adapters: public name to folder. `open_vllm(model)` creates both.
    """

    def __init__(
        self, llm: Any, *, name: str | None = None, adapters: Mapping[str, str] | None = None
    ) -> None:
        self._model = VllmModel(llm, name, adapters or {})
        self._llm = llm
        self._core = CoreClient(llm)
        self._requests = RequestBuilder(llm, self._model)
        self.card = self._model.card
        self.tokenizer = self._model.tokenizer
        self.weight_version: str | None = None

    @property
    def kv_usage(self) -> float | None:
        return self._core.kv_usage

    def submit(self, job: Job, sink: Sink) -> _VllmHandle:
        """Start a job; `sink` is called on the running event loop's thread."""
        self._core.start()
        handle = _VllmHandle(self._core, job.n)
        takers = [CoreContinuation(job, index, sink) for index in range(job.n)]
        if self._model.is_ready(job):
            handle.begin(self._requests.of(job), takers)
        else:
            self._core.spawn(self._process(job, handle, takers))
        return handle

    async def _process(self, job: Job, handle: _VllmHandle, takers: list[CoreContinuation]) -> None:
        """Process media that are no longer cached, then send the requests."""
        try:
            prompt = await asyncio.to_thread(self._model.prompt, job)
            handle.begin(self._requests.of(job, prompt), takers)
        except DragomanError as error:
            for index in sorted(handle.open):
                takers[index].end("error", error)

    def media_token_ids(self, media: Media) -> Sequence[int]:
        """Return the ids that vLLM's processor puts into a prompt for a medium."""
        return self._model.media_token_ids(media)

    def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        """Yield steps until every continuation has finished. Closing the iterator cancels the job."""
        return iterate(self, job)

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the model's pooled vector of each prompt, normalized to length one."""
        requests = self._requests.embedding(prompts, await self._core.tasks())
        vectors = [_PendingEmbedding() for _ in prompts]
        self._core.add(requests, vectors)
        try:
            return await asyncio.gather(*(vector.future for vector in vectors))
        finally:
            self._core.abort([request.request_id for request in requests])

    async def start(self) -> None:
        await self._core.tasks()
        await self._model.load_adapters(self._llm.engine_core.add_lora_async)

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter; `path` is a folder as PEFT writes it."""
        await self._model.load_adapter(name, path, self._llm.engine_core.add_lora_async)

    async def unload_adapter(self, name: str) -> None:
        self._requests.forget()
        await self._model.unload_adapter(name, self._llm.engine_core.remove_lora_async)

    async def stop(self) -> None:
        """End all jobs with finish "abort", and vLLM's processes. The engine cannot be started again."""
        self._model.close()
        await self._core.stop()
        await asyncio.to_thread(self._llm.shutdown)

    async def check(self) -> None:
        """Return when vLLM's core has answered; raise EngineFailed when it is dead."""
        await self._core.tasks()

    async def pause(self) -> None:
        """Return when no step is being computed, so that weights may be changed. Jobs wait meanwhile."""
        self._core.start()
        with telling_errors():
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def resume(self, weight_version: str | None = None) -> None:
        """Continue. Nothing computed with other weights is used again, not even by running jobs."""
        core = self._llm.engine_core
        with telling_errors():
            if weight_version is not None:
                await core.reset_prefix_cache_async(reset_running_requests=True)
                await core.set_weight_version_async(weight_version)
                self.weight_version = weight_version
            await core.resume_scheduler_async()


# Loading a model with vLLM.


logger = logging.getLogger("dragoman.engine")


def open_vllm(model: str, options: VllmOptions | None = None) -> VllmEngine | VllmAsyncLLMEngine:
    """Load a folder, or a name on Hugging Face's hub, outside of an event loop.

    Raises SettingsError, ModelFileError or BindingError if that is not possible.
    """
    options = options or VllmOptions()
    try:
        args = engine_args(model, options)
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        # Selects vLLM's server defaults for this hardware: sequences and prompt tokens per step.
        llm = AsyncLLM.from_engine_args(args, usage_context=UsageContext.OPENAI_API_SERVER)
    except DragomanError:
        raise
    except Exception as error:
        logger.error("Cannot start vLLM", exc_info=error)
        raise ModelFileError(f"vLLM cannot run {model}; see the server log.") from error
    # A million permanent objects of its libraries: scanning them for garbage would stall all answers.
    gc.collect()
    gc.freeze()
    reason = lacking(llm)
    if reason is None:
        return VllmEngine(llm, name=options.name, adapters=options.adapters)
    logger.warning("Using vLLM's generate(), which is slower: %s", reason)
    return VllmAsyncLLMEngine(llm, name=options.name, adapters=options.adapters)
