"""The engine over `transformers`: requests in, steps out, on the library's own thread."""

import asyncio
import atexit
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
from msgspec import Struct

from dragoman.engines.hf_tokenizer import HfTokenizer, card_of
from dragoman.engines.local import hardware
from dragoman.engines.local.hardware import memory_for, split_kv_memory
from dragoman.engines.model_files import sensible
from dragoman.engines.protocol import JobHandle
from dragoman.engines.sampling import Logits
from dragoman.engines.sampling.batched import Continuation
from dragoman.engines.steps import deliver_steps, iterate
from dragoman.errors import (
    MODEL,
    PROMPT,
    BadRequest,
    DragomanError,
    EngineFailed,
    ModelFileError,
    Unavailable,
)
from dragoman.media import Media
from dragoman.types import FinishReason, Job, Sampling, Sink, Step, TokenLogprob

# Options.


class TransformersOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the transformers engine; the defaults depend on the model and the machine."""

    name: str | None = None
    """Public name of the model; default the name of its folder."""
    context: int | None = None
    """Maximum tokens of one sequence, prompt and answer together."""
    slots: int | None = None
    """Sequences in one step."""
    threads: int | None = None
    """Compute threads on a CPU; default one per physical core that this process may use."""
    device: str | None = None
    """`cuda`, `cuda:1`, `cpu`, ...; default a GPU if there is one."""
    dtype: str | None = None
    """`bfloat16`, `float32`, ...; default the checkpoint's on a GPU, and float32 on a CPU."""
    batch: int = 512
    """Maximum tokens in one step on a CPU, which bounds how long a step takes."""
    page: int = 32
    """Tokens in one page of the KV cache; full pages of equal prefixes are shared."""
    kv_memory: int | None = None
    """Bytes of the KV cache on a CPU; default a quarter of the free memory, at most 2 GiB."""


# From a folder or a name to a model on its device.


_WRITES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_GPU_ROWS = 128


class LoadedCheckpoint(Struct, kw_only=True):
    model: Any
    writes: bool
    """Whether it is a language model. An encoder only returns vectors."""
    context: int
    vocabulary: int
    rows: int
    pages: int | None
    """Pages of the KV cache; None lets the library decide, which knows the GPU."""
    senses: Any = None


def load(path: str, options: TransformersOptions) -> LoadedCheckpoint:
    """Load a model. Raises ModelFileError if the library or the model cannot be used."""
    try:
        import torch
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMultimodalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

        # A missing dependency is reported now.
        from dragoman.engines.transformers.batching import why_not
    except ImportError:
        message = "This engine needs newer packages: pip install 'dragoman[transformers]'."
        raise ModelFileError(message) from None
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_cpu = device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(options.threads or hardware.cores())
    folder = str(Path(path).expanduser()) if Path(path).expanduser().exists() else path
    try:
        # Explicit, because without a value it asks the user at the terminal, and would accept a yes.
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        writes = any(sign in name for name in config.architectures or () for sign in _WRITES)
        if writes and (reason := why_not(config.get_text_config())):
            raise ValueError(f"its continuous batching does not support {reason}; try the engine vllm")
        perceives = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
        kind = AutoModelForMultimodalLM if perceives else AutoModelForCausalLM if writes else AutoModel
        dtype = options.dtype or ("float32" if on_cpu else "auto")
        # Unpickling could run arbitrary code.
        model = kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False, use_safetensors=True)
        model = model.to(device).eval()
    except (OSError, ValueError, KeyError) as error:
        raise ModelFileError(f"transformers cannot load {path}: {_first_line(error)}") from error
    loaded = _size(model, writes, on_cpu, options)
    if perceives and writes:
        from dragoman.engines.transformers.media_encoder import open_senses

        loaded.senses = open_senses(folder, model)
    return loaded


def _size(model: Any, writes: bool, on_cpu: bool, options: TransformersOptions) -> LoadedCheckpoint:
    text = model.config.get_text_config()
    trained = int(getattr(text, "max_position_embeddings", None) or 2048)
    rows, context, pages = options.slots or _GPU_ROWS, options.context or trained, None
    if on_cpu and writes:
        tokens = memory_for(options.kv_memory) // _token_bytes(text, model.dtype.itemsize)
        rows, context = split_kv_memory(tokens, trained, options.slots, options.context)
        pages = -(-rows * context // options.page)
    return LoadedCheckpoint(
        model=model,
        writes=writes,
        context=min(context, trained),
        vocabulary=int(text.vocab_size),
        rows=rows,
        pages=pages,
    )


def _token_bytes(text: Any, number: int) -> int:
    """Return the bytes of KV cache per token."""
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return 2 * int(text.num_hidden_layers) * heads * width * number


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# Jobs in the engine: one request of the library for each continuation.


_log = logging.getLogger("dragoman.engine")


class TransformersContinuation:
    """One continuation. The engine's thread advances it; the event loop's thread may cancel it."""

    __slots__ = ("_answer", "_plain", "_takes_largest", "id", "loop", "over", "sink", "view")

    def __init__(self, id: str, answer: Continuation, sink: Sink, loop: asyncio.AbstractEventLoop) -> None:
        self.id = id
        self.sink = sink
        self.loop = loop
        self.over = False
        self.view: Any = None
        """Media in its prompt."""
        self._answer = answer
        self._plain = answer.samples_raw_row
        self._takes_largest = answer.is_pure_greedy

    def __deepcopy__(self, memo: object) -> "TransformersContinuation":
        """Return itself: the library copies its arguments when it restarts a request, but the answer
        continues.
        """
        return self

    @property
    def index(self) -> int:
        return self._answer.index

    @property
    def sampling(self) -> Sampling:
        return self._answer.sampling

    def uniform(self) -> float:
        """Return the number in [0, 1) that decides the next draw."""
        return self._answer.uniform()

    def in_company(self, drawing: bool) -> bool:
        """Whether its row may be sampled together with others on the device; `drawing`: whether more than
        the largest can be taken there. For a cancelled run any result will do.
        """
        return self.over or (self._plain if drawing else self._takes_largest)

    def take(self, token: int, logprob: TokenLogprob | None) -> Step | None:
        """Return the step for an id that was sampled elsewhere, as `advance`."""
        return self._step(lambda: self._answer.accept(token, logprob))

    def advance(self, row: Logits) -> Step | None:
        """Return the next step; None for a run that was cancelled while the step was computed."""
        return self._step(lambda: self._answer.advance(row))

    def _step(self, choose: Callable[[], Step]) -> Step | None:
        if self.over:
            return None
        try:
            step = choose()
        except Exception:
            _log.exception("Cannot sample an id")
            return self.end("error", EngineFailed("The engine failed to sample a token."))
        self.over = step.finish is not None
        return step

    def end(self, finish: FinishReason, error: DragomanError | None = None) -> Step | None:
        if self.over:
            return None
        self.over = True
        return Step([], self.index, finish=finish, error=error)


ContinuationStep: TypeAlias = tuple[TransformersContinuation, Step]


# The engine.


T = TypeVar("T")
_UNSUPPORTED = frozenset({"prompt_logprobs", "priority", "cache_salt", "reuse_prefix"})


class _TransformersHandle:
    __slots__ = ("_engine", "_runs")

    def __init__(self, engine: "TransformersEngine", runs: list[TransformersContinuation]) -> None:
        self._engine = engine
        self._runs = runs

    def cancel(self, index: int | None = None) -> None:
        for run in self._runs if index is None else self._runs[index : index + 1]:
            run.over = True
            self._engine.drop(run)


class TransformersEngine:
    """Engine over transformers. `TransformersEngine.open("models/qwen3")` loads; `start` or the first job
    starts the thread.
    """

    def __init__(
        self, loaded: LoadedCheckpoint, tokenizer: HfTokenizer, options: TransformersOptions, name: str
    ) -> None:
        self.tokenizer = tokenizer
        self.card = card_of(
            tokenizer,
            name=name,
            max_model_len=loaded.context,
            slots=loaded.rows,
            constrains=True,
            has_samplers=True,
            sampling=_read_recommended(loaded.model),
            unsupported=_UNSUPPORTED,
            created=int(time.time()),
            details=_details(loaded),
        )
        self.card.max_concurrent_embeds = 1
        if loaded.senses is not None:
            self.card.modalities = loaded.senses.modalities
        self.weight_version: str | None = None
        self.failure: DragomanError | None = None
        """Why the engine takes no more work; None while it runs."""
        self._loaded = loaded
        self._senses = loaded.senses
        self._options = options
        self._runs: dict[str, TransformersContinuation] = {}
        self._manager: Any = None
        # The thread that pauses the library's loop must be the one that resumes it.
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="dragoman-beside")
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="dragoman-encoding")
        self._paused = ExitStack()

    @property
    def live(self) -> int:
        """Continuations that are being computed."""
        return len(self._runs)

    @classmethod
    def open(cls, path: str, options: TransformersOptions | None = None) -> Self:
        """Load a folder, or a name that transformers knows. Raises ModelFileError."""
        options = options or TransformersOptions()
        loaded = load(path, options)
        tokenizer = HfTokenizer(path, size=loaded.vocabulary)
        return cls(loaded, tokenizer, options, options.name or Path(path).name)

    def submit(self, job: Job, sink: Sink) -> JobHandle:
        """Start a job; `sink` is called on the running event loop's thread."""
        if not self._loaded.writes:
            raise BadRequest("This model only returns embeddings; it cannot generate.", param=MODEL)
        self._start()
        loop = asyncio.get_running_loop()
        prompt = np.array(job.prompt, np.int32)
        room = self.card.context_tokens - len(job.prompt)
        runs = []
        for index in range(job.n):
            answer = Continuation(
                job, index, prompt, vocabulary=self._loaded.vocabulary, ends=self.tokenizer.end_ids, room=room
            )
            runs.append(TransformersContinuation(f"{job.id}-{index}", answer, sink, loop))
        self._runs |= {run.id: run for run in runs}
        if job.media:
            # In a separate thread: other jobs' steps continue meanwhile.
            self._encoding.submit(self._perceive, job, runs)
        else:
            self._add(job.prompt, runs)
        return _TransformersHandle(self, runs)

    def media_token_ids(self, media: Media) -> Sequence[int]:
        """Return the ids that the model's processor puts into a prompt for a medium."""
        return list(self._senses.media_token_ids(media))

    def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        """Yield steps until every continuation has finished. Closing the iterator cancels the job."""
        return iterate(self, job)

    def _add(self, prompt: Sequence[int], runs: Iterable[TransformersContinuation]) -> None:
        room = self.card.context_tokens - len(prompt)
        for run in runs:
            most = min(run.sampling.max_tokens, room)
            self._manager.add_request(list(prompt), run.id, max_new_tokens=most, run=run)
            if run.over:
                # Cancelled before the library knew of it.
                self._manager.cancel_request(run.id)
        if self.failure is not None:
            # The thread may have ended before it saw these requests.
            self.ended()

    def _perceive(self, job: Job, runs: list[TransformersContinuation]) -> None:
        """Encode a job's media, and add the runs that were not cancelled meanwhile."""
        try:
            view = self._senses.view(job.media, lambda: all(run.over for run in runs))
            waiting = [run for run in runs if not run.over]
            for run in waiting:
                run.view = view
            self._add(view.prompt(job.prompt), waiting)
        except Exception as error:
            _log.error("Cannot encode an image or audio", exc_info=error)
            for run in runs:
                self.failed(run.id, error if isinstance(error, DragomanError) else None)

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the mean of the last hidden states of each prompt, normalized to length one."""
        for prompt in prompts:
            if len(prompt) > self.card.context_tokens:
                raise BadRequest(
                    f"This model embeds at most {self.card.context_tokens} tokens.", param=PROMPT
                )
        from dragoman.engines.transformers.batching import mean_vectors

        after = () if self._loaded.writes else self.tokenizer.after
        framed = [(*prompt, *after)[: self.card.max_model_len] for prompt in prompts]
        return await self._aside(
            lambda: self._between_steps(lambda: mean_vectors(self._loaded.model, framed))
        )

    async def start(self) -> None:
        if self._loaded.writes:
            self._start()

    async def stop(self) -> None:
        """End all jobs with finish "abort". The engine cannot be started again."""
        await asyncio.to_thread(self.close)

    async def check(self) -> None:
        """Return when the library's thread has answered; raise EngineFailed when it is dead."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self._manager is not None:
            await self._aside(lambda: self._between_steps(lambda: None))

    async def pause(self) -> None:
        """Return when no step is being computed, so that weights may be changed. Jobs continue after
        `resume`.
        """
        if not self._loaded.writes:
            message = "This model only returns embeddings; its weights cannot be changed while it serves."
            raise BadRequest(message, code="unsupported_model")
        self._start()
        await self._aside(self._hold_still)

    def _hold_still(self) -> None:
        self._paused.enter_context(self._manager.pause())
        if self._senses is not None:
            self._paused.enter_context(self._senses.still())

    async def resume(self, weight_version: str | None = None) -> None:
        """Continue. Nothing computed with other weights is shared with new prompts."""
        if weight_version is not None:
            self.weight_version = weight_version
            self._evict()
            if self._senses is not None:
                self._senses.forget()
        await self._aside(self._paused.close)

    def drop(self, run: TransformersContinuation) -> None:
        """Drop a run; the library removes it before its next step."""
        if self._runs.pop(run.id, None) is not None and self.failure is None:
            self._manager.cancel_request(run.id)

    def said(self, steps: list[ContinuationStep]) -> None:
        """Handle the steps of the library's thread, once per step."""
        for run, step in steps:
            step.weight_version = self.weight_version
            if step.finish == "length":
                self._runs.pop(run.id, None)
            elif step.finish is not None:
                self.drop(run)
        deliver_steps(steps, self.drop)

    def failed(self, id: str, error: DragomanError | None = None) -> None:
        """End a failed run. From any thread."""
        run = self._runs.pop(id, None)
        step = None if run is None else run.end("error", error) if error else self._last_step(run)
        if run is not None and step is not None:
            deliver_steps([(run, step)], self.drop)

    def ended(self) -> None:
        self.failure = self.failure or EngineFailed("The engine failed and takes no more requests.")
        for id in list(self._runs):
            self.failed(id)

    def _last_step(self, run: TransformersContinuation) -> Step | None:
        if isinstance(self.failure, Unavailable):
            return run.end("abort")
        return run.end("error", EngineFailed("The engine failed during the answer."))

    def _start(self) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if self._manager is None:
            from dragoman.engines.transformers.batching import make_manager

            self._manager, room = make_manager(
                self._loaded.model,
                self,
                page=self._options.page,
                pages=self._loaded.pages,
                batch=self._options.batch,
                rows=self._loaded.rows,
                longest=0 if self._senses is None else self._senses.longest_block,
            )
            if self._senses is not None:
                self._senses.serve(self._manager, lambda: self._between_steps(self._evict), room)
            # Threads inherit being daemons: a computing thread must not keep the process alive at its end.
            starter = Thread(target=self._manager.start, daemon=True)
            starter.start()
            starter.join()
            atexit.register(self.close)

    def _evict(self) -> None:
        self._manager.batch_processor.cache.evict_cached_blocks()

    def close(self) -> None:
        """Stop the engine, for callers without an event loop."""
        self.failure = self.failure or Unavailable("The engine has been stopped.")
        self._paused.close()
        self._encoding.shutdown(cancel_futures=True)
        if self._senses is not None:
            self._senses.close()
        if self._manager is not None:
            self._manager.stop(block=True, hard_stop=True)
        self._beside.shutdown()
        atexit.unregister(self.close)

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
            _log.exception("Cannot run work between steps")
            raise EngineFailed("The engine failed in this call; see the server log.") from None


def _details(loaded: LoadedCheckpoint) -> dict[str, str]:
    model = loaded.model
    return {
        "architecture": type(model).__name__,
        "parameters": str(sum(each.numel() for each in model.parameters())),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "slots": str(loaded.rows),
        "runner": "transformers",
    }


def _read_recommended(model: Any) -> dict[str, float]:
    """Return the sampling defaults of the model's own configuration, without the library's defaults."""
    config = getattr(model, "generation_config", None)
    return {} if config is None else sensible(config.to_diff_dict())
