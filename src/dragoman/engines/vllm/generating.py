"""vLLM as an Engine by its public door, `AsyncLLM.generate`: for versions whose core we cannot read."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from dragoman.engines.vllm.faults import FAILED, told
from dragoman.engines.vllm.model import VllmModel
from dragoman.engines.vllm.outputs import finish_of
from dragoman.engines.vllm.params import prompt_of
from dragoman.errors import EngineFailed
from dragoman.types import Job, Step, TokenLogprob


class VllmGenerating:
    """Around any `AsyncLLM`, also one that others use. It costs a task and a queue for each answer."""

    def __init__(
        self, llm: Any, *, name: str | None = None, adapters: Mapping[str, str] | None = None
    ) -> None:
        self._model = VllmModel(llm, name, adapters or {})
        self._llm = llm
        self.card = self._model.card
        self.tokenizer = self._model.tokenizer

    async def generate(self, job: Job) -> AsyncIterator[Step]:
        """The steps of one continuation. Closing the iterator aborts the request."""
        params = self._model.sampling_params(job)
        with told():
            outputs = self._llm.generate(
                prompt_of(job.prompt, job.cache_salt),
                params,
                job.id,
                lora_request=self._model.adapter(job),
                priority=job.priority,
            )
            first = True
            async with aclosing(outputs):
                async for output in outputs:
                    yield _step(job, output, first)
                    first = False

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """What the model's pooler makes of each prompt, at length one."""
        params = self._model.pooling_params()
        return await asyncio.gather(
            *(self._vector(f"embed-{n}", prompt, params) for n, prompt in enumerate(prompts))
        )

    async def start(self) -> None:
        await self._model.load_adapters(self._llm.add_lora)

    async def stop(self) -> None:
        """End vLLM's processes, and with them all jobs. There is no second start."""
        await asyncio.to_thread(self._llm.shutdown)

    async def check(self) -> None:
        """Raise EngineFailed when vLLM says that it is dead."""
        with told():
            await self._llm.check_health()

    async def _vector(self, id: str, prompt: Sequence[int], params: Any) -> list[float]:
        with told():
            async for output in self._llm.encode(prompt_of(prompt, ""), params, id):
                vector: list[float] = output.outputs.data.tolist()
                return vector
        raise EngineFailed("The engine gave no embedding.")


def _step(job: Job, output: Any, first: bool) -> Step:
    said = output.outputs[0]
    step = Step(list(said.token_ids))
    if said.logprobs is not None:
        step.logprobs = [
            _told(id_, row, job.sampling.logprobs or 0)
            for id_, row in zip(step.ids, said.logprobs, strict=True)
        ]
    if first:
        step.cached_tokens = output.num_cached_tokens or 0
        if output.prompt_logprobs is not None:
            step.prompt_logprobs = [
                None if row is None else _told(id_, row, job.sampling.prompt_logprobs or 0)
                for id_, row in zip(job.prompt, output.prompt_logprobs, strict=True)
            ]
    if said.finish_reason is not None:
        step.finish = finish_of(said.finish_reason)
        step.error = EngineFailed(FAILED) if step.finish == "error" else None
        step.stop_id = said.stop_reason if said.stop_reason in job.sampling.stop_token_ids else None
    return step


def _told(id_: int, row: Mapping[int, Any], top: int) -> TokenLogprob:
    """vLLM tells of the chosen id in any case, and of its rank; beside it the likeliest are wanted."""
    likeliest = sorted(row.items(), key=lambda entry: entry[1].rank)[:top]
    return TokenLogprob(id_, row[id_].logprob, tuple((other, told.logprob) for other, told in likeliest))
