"""An AsyncLLM-shaped engine as an Engine: requests out, steps back, and an abort on every other way out."""

import inspect
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from typing import Any

from dragoman.engines.asyncllm.endings import error_of, refused
from dragoman.engines.asyncllm.facts import length_of, manager_of, name_of, sources_of, tokenizer_of
from dragoman.engines.asyncllm.outputs import OutputReader
from dragoman.engines.asyncllm.request import form_of
from dragoman.engines.protocol import ModelCard
from dragoman.errors import SettingsError
from dragoman.types import Job, SourceForm, Step

logger = logging.getLogger("dragoman.engines")


class AsyncLLMEngine:
    """`AsyncLLMEngine(llm)`: what is not given is taken from the engine.

    `tokenizer` is one of Hugging Face or a Tokenizer, `chat_template` the source of a template. `adapters`
    names the LoRA adapters that it has loaded; `sources` are the forms of constraints that it takes.
    """

    def __init__(
        self,
        engine: Any,
        tokenizer: Any = None,
        chat_template: str | None = None,
        model_name: str | None = None,
        max_model_len: int | None = None,
        *,
        adapters: Collection[str] = (),
        sources: Collection[SourceForm] | None = None,
    ) -> None:
        self._manager = manager_of(engine)
        self._form = form_of(self._manager)
        if adapters and "lora_path" not in self._form.has:
            raise SettingsError("The requests of this engine have no lora_path, so it has no adapters.")
        self.tokenizer = tokenizer_of(engine, tokenizer)
        own = getattr(self.tokenizer, "templates", {})
        self.card = ModelCard(
            name=model_name or name_of(engine),
            max_model_len=max_model_len or length_of(engine, self.tokenizer),
            templates=own if chat_template is None else {"default": chat_template},
            special_tokens=getattr(self.tokenizer, "special_tokens", {}),
            adapters=tuple(adapters),
            sources=sources_of(engine, self._form) if sources is None else sources,
            skips_reasoning=self._form.skips_reasoning,
            unsupported=self._form.unsupported,
        )

    async def generate(self, job: Job) -> AsyncIterator[Step]:
        request = self._form.request(job)
        reader = OutputReader(job)
        try:
            async with aclosing(self._manager.generate_request(request)) as outputs:
                try:
                    async for output in outputs:
                        yield reader.step(output)
                        if reader.over:
                            return
                finally:
                    if reader.over:
                        # What the engine does after its last output is done too, whoever has left by then.
                        await anext(outputs, None)
        except Exception as error:
            if refused(error, begun=reader.begun):
                # The engine's words stay in the log: an exception may hold anything.
                logger.warning("The engine refused job %s: %s", job.id, error)
                raise error_of(error) from error
            raise
        finally:
            if not reader.over:
                await self._abort(request.rid)

    async def _abort(self, rid: str) -> None:
        """After the generator was closed, which is enough for some engines and means nothing to others."""
        abort = getattr(self._manager, "abort_request", None)
        if abort is None:
            return
        try:
            done = abort(rid)
            if inspect.isawaitable(done):
                await done
        except Exception:
            logger.exception("The engine could not abort request %s", rid)
