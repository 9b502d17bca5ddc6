"""The engine over `transformers`: requests in, steps out, by the library's own thread."""

import asyncio
import atexit
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any, Self, TypeVar

import numpy as np

from dragoman.engines.choosing.continuation import Continuation
from dragoman.engines.delivery import deliver
from dragoman.engines.hf_tokenizer import HfTokenizer, card_of
from dragoman.engines.protocol import Handle
from dragoman.engines.recommended import sensible
from dragoman.engines.steps import iterate
from dragoman.engines.transformers.embedding import mean_vectors
from dragoman.engines.transformers.loading import Loaded, load
from dragoman.engines.transformers.options import TransformersOptions
from dragoman.engines.transformers.run import Run, Said
from dragoman.errors import MODEL, PROMPT, BadRequest, DragomanError, EngineFailed, Unavailable
from dragoman.types import Job, Sink, Step

T = TypeVar("T")
_log = logging.getLogger("dragoman.engine")
_UNSUPPORTED = frozenset({"prompt_logprobs", "priority", "cache_salt", "reuse_prefix"})


class _Handle:
    __slots__ = ("_engine", "_runs")

    def __init__(self, engine: "TransformersEngine", runs: list[Run]) -> None:
        self._engine = engine
        self._runs = runs

    def cancel(self, index: int | None = None) -> None:
        for run in self._runs if index is None else self._runs[index : index + 1]:
            run.over = True
            self._engine.drop(run)


class TransformersEngine:
    """`TransformersEngine.open("models/qwen3")` loads; `start` or the first job starts the thread."""

    def __init__(
        self, loaded: Loaded, tokenizer: HfTokenizer, options: TransformersOptions, name: str
    ) -> None:
        self.tokenizer = tokenizer
        self.card = card_of(
            tokenizer,
            name=name,
            max_model_len=loaded.context,
            slots=loaded.rows,
            constrains=True,
            has_samplers=True,
            sampling=_recommended(loaded.model),
            unsupported=_UNSUPPORTED,
            created=int(time.time()),
            details=_details(loaded),
        )
        self.card.embeds_at_once = 1
        self.weight_version: str | None = None
        self.failure: DragomanError | None = None
        """Why the engine takes no more work; None while it lives."""
        self._loaded = loaded
        self._options = options
        self._runs: dict[str, Run] = {}
        self._manager: Any = None
        # Whoever pauses the library's loop must be the one who lets it go on.
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="dragoman-beside")
        self._paused = ExitStack()

    @property
    def live(self) -> int:
        """Continuations that are still computed."""
        return len(self._runs)

    @classmethod
    def open(cls, path: str, options: TransformersOptions | None = None) -> Self:
        """Load a folder, or a name that transformers knows. Raises ModelFileError where it cannot."""
        options = options or TransformersOptions()
        loaded = load(path, options)
        tokenizer = HfTokenizer(path, size=loaded.vocabulary)
        return cls(loaded, tokenizer, options, options.name or Path(path).name)

    def submit(self, job: Job, sink: Sink) -> Handle:
        """Start a job; `sink` is called on the running event loop's thread."""
        if not self._loaded.writes:
            raise BadRequest("This model gives embeddings only; it cannot write.", param=MODEL)
        self._start()
        loop = asyncio.get_running_loop()
        prompt = np.array(job.prompt, np.int32)
        room = self.card.max_model_len - len(job.prompt)
        runs = []
        for index in range(job.n):
            answer = Continuation(
                job, index, prompt, vocabulary=self._loaded.vocabulary, ends=self.tokenizer.end_ids, room=room
            )
            runs.append(Run(f"{job.id}-{index}", answer, sink, loop))
        for run in runs:
            self._runs[run.id] = run
            self._manager.add_request(
                list(job.prompt), run.id, max_new_tokens=min(job.sampling.max_tokens, room), run=run
            )
        if self.failure is not None:
            # The thread may have ended before it saw these, and nobody else would tell of them.
            self.ended()
        return _Handle(self, runs)

    def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        """Steps until every continuation has finished. Closing the iterator cancels the job."""
        return iterate(self, job)

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """The mean of the last hidden states of each prompt, at length one."""
        for prompt in prompts:
            if len(prompt) > self.card.max_model_len:
                raise BadRequest(f"This model embeds at most {self.card.max_model_len} tokens.", param=PROMPT)
        after = () if self._loaded.writes else self.tokenizer.after
        framed = [(*prompt, *after)[: self.card.max_model_len] for prompt in prompts]
        return await self._aside(lambda: self._embed(framed))

    async def start(self) -> None:
        if self._loaded.writes:
            self._start()

    async def stop(self) -> None:
        """End all jobs with finish "abort". There is no second start."""
        await asyncio.to_thread(self.close)

    async def check(self) -> None:
        """Return when the library's thread has come by; raise EngineFailed when it is dead."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self._manager is not None:
            await self._aside(lambda: self._between_steps(lambda: None))

    async def pause(self) -> None:
        """Return when no step is being computed, so that weights may be changed. Jobs go on after it."""
        if not self._loaded.writes:
            message = "This model gives embeddings only; its weights cannot be changed while it serves."
            raise BadRequest(message, code="unsupported_model")
        self._start()
        await self._aside(lambda: self._paused.enter_context(self._manager.pause()))

    async def resume(self, weight_version: str | None = None) -> None:
        """Go on. What was computed with other weights is not shared with new prompts."""
        if weight_version is not None:
            self.weight_version = weight_version
            self._manager.batch_processor.cache.evict_cached_blocks()
        await self._aside(self._paused.close)

    def drop(self, run: Run) -> None:
        """Forget a run; the library is rid of it before its next step."""
        if self._runs.pop(run.id, None) is not None and self.failure is None:
            self._manager.cancel_request(run.id)

    def said(self, steps: list[Said]) -> None:
        """From the library's thread, once a step."""
        for run, step in steps:
            step.weight_version = self.weight_version
            if step.finish == "length":
                self._runs.pop(run.id, None)
            elif step.finish is not None:
                self.drop(run)
        deliver(steps, self.drop)

    def failed(self, id: str) -> None:
        """From the library's thread, which has said in the log what went wrong."""
        run = self._runs.pop(id, None)
        step = None if run is None else self._last_step(run)
        if run is not None and step is not None:
            deliver([(run, step)], self.drop)

    def ended(self) -> None:
        self.failure = self.failure or EngineFailed("The engine failed and takes no more requests.")
        for id in list(self._runs):
            self.failed(id)

    def _last_step(self, run: Run) -> Step | None:
        if isinstance(self.failure, Unavailable):
            return run.end("abort")
        return run.end("error", EngineFailed("The engine failed while it was writing the answer."))

    def _start(self) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self._manager is None:
            from dragoman.engines.transformers.batching import make_manager

            on_gpu = self._loaded.pages is None
            self._manager = make_manager(
                self._loaded.model,
                self,
                page=self._options.page,
                pages=self._loaded.pages,
                batch=None if on_gpu else self._options.batch,
                rows=self._loaded.rows,
            )
            # Threads inherit it: one that computes must not keep a process alive that has come to its end.
            starter = Thread(target=self._manager.start, daemon=True)
            starter.start()
            starter.join()
            atexit.register(self.close)

    def close(self) -> None:
        """`stop`, for those who have no event loop."""
        self.failure = self.failure or Unavailable("The engine has been stopped.")
        self._paused.close()
        if self._manager is not None:
            self._manager.stop(block=True, hard_stop=True)
        self._beside.shutdown()
        atexit.unregister(self.close)

    def _embed(self, prompts: list[tuple[int, ...]]) -> list[list[float]]:
        return self._between_steps(lambda: mean_vectors(self._loaded.model, prompts))

    def _between_steps(self, work: Callable[[], T]) -> T:
        """Use the model while no step is computed with it."""
        if self._manager is None:
            return work()
        with self._manager.pause():
            return work()

    async def _aside(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._beside, work)
        except DragomanError:
            raise
        except Exception:
            _log.exception("work beside the steps failed")
            raise EngineFailed("The engine failed at what it was asked.") from None


def _details(loaded: Loaded) -> dict[str, str]:
    model = loaded.model
    return {
        "architecture": type(model).__name__,
        "parameters": str(sum(each.numel() for each in model.parameters())),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "slots": str(loaded.rows),
        "runner": "transformers",
    }


def _recommended(model: Any) -> dict[str, float]:
    """What the model's own configuration says, without what the library adds to every one."""
    config = getattr(model, "generation_config", None)
    return {} if config is None else sensible(config.to_diff_dict())
