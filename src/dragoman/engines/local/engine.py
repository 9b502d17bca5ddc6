"""The embedded engine: weights in this process, one thread that computes, steps delivered to the event
loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from dragoman.engines.local import hardware
from dragoman.engines.local.draft_model import Drafter
from dragoman.engines.local.engine_thread import EmbeddingTask, EngineThread
from dragoman.engines.local.opening import open_model
from dragoman.engines.local.options import LocalOptions, check_job, check_prompt
from dragoman.engines.local.runner import AnyRunner, TrainableRunner
from dragoman.engines.local.scheduler import Scheduler
from dragoman.engines.local.sequence import SequenceGroup, make_group
from dragoman.engines.protocol import EngineFaults, ModelCard, Tokenizer
from dragoman.engines.steps import iterate
from dragoman.media import Media, unsupported
from dragoman.types import Job, Sink, Step

if TYPE_CHECKING:
    from dragoman.engines.local.encoder_cache import EncoderCache
    from dragoman.engines.local.pytorch.training import WeightSource


class LocalHandle:
    __slots__ = ("_group", "_worker")

    def __init__(self, worker: EngineThread, group: SequenceGroup) -> None:
        self._worker = worker
        self._group = group

    def cancel(self, index: int | None = None) -> None:
        """Stop one continuation, or all. Each gets a last step with finish "abort".

        A step that is already on its way to the event loop still arrives.
        """
        self._worker.cancel(self._group, index)


class LocalEngine:
    """A runner behind a scheduler, with its own thread that starts with `start` or the first job.

    Usually created with `LocalEngine.open("model.gguf")`.
    """

    batches_steps = True
    """Steps of all jobs may be gathered at once (see `steps.BatchSink`)."""

    def __init__(
        self,
        runner: AnyRunner,
        tokenizer: Tokenizer,
        card: ModelCard,
        options: LocalOptions | None = None,
        drafter: Drafter | None = None,
        pictures: "EncoderCache | None" = None,
    ) -> None:
        options = options or LocalOptions()
        self.card = card
        self.tokenizer = tokenizer
        self._runner = runner
        threads = options.threads or hardware.cores()
        self._scheduler = Scheduler(
            runner,
            batch=options.batch,
            chunk=options.chunk,
            choosers=threads,
            guesses=options.guesses,
            drafter=drafter,
            pictures=pictures,
            pause=options.pause,
        )
        self._pictures = pictures
        self._worker = EngineThread(runner, self._scheduler, pictures)
        self._loading = asyncio.Lock()

    @classmethod
    def open(cls, path: str | Path, options: LocalOptions | None = None) -> Self:
        """Load a GGUF file, a folder exported for OpenVINO, or a folder of safetensors for `torch`.

        Raises ModelFileError or BindingError if that is not possible.
        """
        options = options or LocalOptions()
        opened = open_model(Path(path).expanduser(), options)
        kind: type[LocalEngine] = cls
        if cls is LocalEngine and isinstance(opened.runner, TrainableRunner):
            kind = TrainableEngine
        engine = kind(
            opened.runner, opened.tokenizer, opened.card, opened.options, opened.drafter, opened.pictures
        )
        return cast(Self, engine)

    def media_token_ids(self, media: Media) -> Sequence[int]:
        """Return the ids that represent an image or audio in a prompt. From any thread."""
        if self._pictures is None:
            raise unsupported(media.kind, self.card.modalities)
        return self._pictures.media_token_ids(media)

    def submit(self, job: Job, sink: Sink) -> LocalHandle:
        """Start a job; `sink` is called on the running event loop's thread."""
        check_job(job, self._runner, self.card.modalities)
        ends = self.tokenizer.end_ids
        group = make_group(job, sink, asyncio.get_running_loop(), self._runner, ends, self._pictures)
        self._worker.submit(group)
        return LocalHandle(self._worker, group)

    def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        """Yield steps until every continuation has finished. Closing the iterator cancels the job."""
        return iterate(self, job)

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the mean of the last hidden states of each prompt, normalized to length one."""
        return await self.embed_for("", prompts)

    async def embed_for(self, owner: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        for prompt in prompts:
            check_prompt(prompt, self._runner)
        embedding = EmbeddingTask(prompts, self._runner, asyncio.get_running_loop(), owner)
        self._worker.embed(embedding)
        return await embedding.future

    async def load_adapter(self, name: str, path: str) -> None:
        """Read a LoRA adapter while answers continue; jobs may use it when this returns."""
        async with self._loading:
            add = await asyncio.to_thread(self._runner.read_adapter, name, Path(path))
            await self._worker.run_task(add)

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter. Raises Conflict if a job uses it."""

        def drop() -> None:
            self._worker.check_unused(name)
            self._runner.drop_adapter(name)

        await self._worker.run_task(drop)

    async def start(self) -> None:
        self._worker.start()

    async def stop(self) -> None:
        """End all jobs with finish "abort" and free the memory. The engine cannot be started again."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Stop the engine, for callers without an event loop."""
        self._worker.stop()

    @property
    def faults(self) -> EngineFaults:
        """Counters of failed steps and runner rebuilds since the engine was opened."""
        return self._scheduler.faults

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV cache used by running answers."""
        return self._scheduler.kv_usage

    @property
    def heartbeat(self) -> int:
        """A counter that changes while the engine thread makes progress."""
        return self._worker.pulse

    def abandon(self) -> None:
        """Abandon a stuck thread. Its memory is freed only if it continues after all."""
        self._worker.abandon()

    async def check(self) -> None:
        """Return when the engine thread has answered; raise EngineFailed when it is dead."""
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()

        def answer() -> None:
            loop.call_soon_threadsafe(answered.set)

        self._worker.post(answer)
        await answered.wait()
        self._worker.check()


class TrainableEngine(LocalEngine):
    """A LocalEngine over the runner `torch`, whose weights can be changed while it serves."""

    def __init__(self, runner: AnyRunner, *args: Any, **more: Any) -> None:
        super().__init__(runner, *args, **more)
        assert isinstance(runner, TrainableRunner)
        self._trained = runner

    @property
    def weight_version(self) -> str | None:
        return self._scheduler.weight_version

    async def pause(self) -> None:
        """Return when no step is being computed. Running jobs stand still, and new ones wait."""
        await self._worker.pause(True)

    async def resume(self, weight_version: str | None = None) -> None:
        """Continue. If the version of the weights changes, everything computed before is discarded."""
        if weight_version is not None and weight_version != self.weight_version:
            await self._worker.run_task(partial(self._change, lambda: None, weight_version))
        await self._worker.pause(False)

    async def update_weights(self, source: "WeightSource", weight_version: str | None = None) -> None:
        """Replace the weights with the same names, between two steps: all of them, or none.

        `source` has tensors by their names in Hugging Face's files, or is the path of such a file or folder.
        Running answers continue with the new weights, whether or not they are paused. Raises BadRequest or
        ModelFileError, with nothing changed, for weights that do not fit this model.
        """
        async with self._loading:
            put = await asyncio.to_thread(self._trained.read_weights, source)
            await self._worker.run_task(partial(self._change, put, weight_version))

    def _change(self, put: Callable[[], None], weight_version: str | None) -> None:
        # First, because replacing the weights may fail halfway.
        self._scheduler.discard_cache()
        put()
        if weight_version is not None:
            self._scheduler.weight_version = weight_version
