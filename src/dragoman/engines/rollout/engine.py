"""An executor with a blocking `generate` as an engine: what waits together goes in one call.

Steps come when a call returns, all ids of an answer at once. The thread that calls is not the event loop's,
so streams begin at once, clients that leave are noticed, and nothing else stalls.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from threading import Condition, Thread
from typing import Any, Protocol

from msgspec.structs import replace

from dragoman.engines.delivery import deliver
from dragoman.engines.protocol import UNSUPPORTABLE, ModelCard, Tokenizer
from dragoman.engines.rollout.outputs import step_of
from dragoman.engines.rollout.params import HONOURED, params_of
from dragoman.engines.steps import iterate, single
from dragoman.errors import BadRequest, DragomanError, EngineFailed, Unavailable
from dragoman.types import FinishReason, Job, Sink, Step

_log = logging.getLogger("dragoman.engine")


class Executor(Protocol):
    def generate(self, prompts: list[Any], sampling_params: list[Any]) -> Sequence[Any]:
        """One output per prompt, in their order: `outputs[0].token_ids`, `.finish_reason`, `.logprobs`."""


class _Wish:
    """One continuation that waits for a call, or is in one."""

    __slots__ = ("index", "job", "loop", "over", "sink")

    def __init__(self, job: Job, index: int, sink: Sink, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.index = index
        self.sink = sink
        self.loop = loop
        self.over = False

    def end(self, finish: FinishReason, error: DragomanError | None = None) -> Step:
        return Step([], self.index, finish=finish, error=error)


class RolloutEngine:
    """`honoured` are the fields that the executor keeps to; a request that uses another one is refused.

    An executor that wants more than lists of ids and dicts gets them from `make_prompt` and `make_params`:
    for vLLM's `LLM`, `lambda ids: {"prompt_token_ids": ids}` and `lambda params: SamplingParams(**params)`.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        card: ModelCard,
        *,
        batch: int = 64,
        honoured: Collection[str] = HONOURED,
        make_prompt: Callable[[list[int]], Any] = list,
        make_params: Callable[[dict[str, Any]], Any] = dict,
        weight_version: str | None = None,
    ) -> None:
        if unknown := frozenset(honoured) - UNSUPPORTABLE:
            raise ValueError(f"not a field that can be honoured: {', '.join(sorted(unknown))}")
        self.tokenizer = tokenizer
        # The queue is ours, so priorities are kept whatever the executor can do.
        self.card = replace(card, unsupported=UNSUPPORTABLE - {"priority", *honoured})
        self.weight_version = weight_version
        self._executor = executor
        self._batch = batch
        self._honoured = frozenset(honoured)
        self._make_prompt = make_prompt
        self._make_params = make_params
        self._change = Condition()
        self._waiting: list[_Wish] = []
        self._calling: list[_Wish] = []
        self._paused = False
        self._stopped = False
        self._thread: Thread | None = None

    @property
    def live(self) -> int:
        """Continuations that wait or are being computed, and were not cancelled."""
        return sum(not wish.over for wish in (*self._waiting, *self._calling))

    def submit(self, job: Job, sink: Sink) -> "_Handle":
        """Queue a job; `sink` is called on the running event loop's thread."""
        if job.constraint is not None or job.adapter is not None:
            raise BadRequest("This engine takes neither constraints nor adapters.")
        loop = asyncio.get_running_loop()
        wishes = [_Wish(single(job, index), index, sink, loop) for index in range(job.n)]
        with self._change:
            self._start()
            self._waiting += wishes
            self._change.notify_all()
        return _Handle(self, wishes)

    def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        return iterate(self, job)

    async def start(self) -> None:
        with self._change:
            self._start()

    async def stop(self) -> None:
        """End what waits with finish "abort", and return when the running call has ended."""
        with self._change:
            self._stopped = True
            self._change.notify_all()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def check(self) -> None:
        if self._thread is not None and not self._thread.is_alive():
            raise EngineFailed("The engine's thread has ended.")

    async def pause(self) -> None:
        """Return when no call is running, so that weights may be changed. Jobs wait until `resume`."""
        await asyncio.to_thread(self._pause)

    async def resume(self, weight_version: str | None = None) -> None:
        """Go on, with the weights of this version where one is given."""
        with self._change:
            self.weight_version = weight_version or self.weight_version
            self._paused = False
            self._change.notify_all()

    def drop(self, wish: _Wish) -> None:
        """What waits leaves the queue. What is in a call cannot be stopped, and nobody hears of it."""
        wish.over = True
        with self._change:
            if wish in self._waiting:
                self._waiting.remove(wish)

    def _start(self) -> None:
        if self._stopped:
            raise Unavailable("The engine has been stopped.")
        if self._thread is None:
            self._thread = Thread(target=self._run, name="dragoman-rollout", daemon=True)
            self._thread.start()

    def _pause(self) -> None:
        with self._change:
            self._paused = True
            self._change.wait_for(lambda: not self._calling)

    def _run(self) -> None:
        while calling := self._next():
            version = self.weight_version
            said = self._call(calling)
            for _, step in said:
                step.weight_version = version
            with self._change:
                self._calling = []
                self._change.notify_all()
            deliver([entry for entry in said if not entry[0].over], self.drop)
        left, self._waiting = self._waiting, []
        deliver([(wish, wish.end("abort")) for wish in left], self.drop)

    def _next(self) -> list[_Wish]:
        """Wait for work, and take what goes in one call; nothing when it is over."""
        with self._change:
            self._change.wait_for(lambda: self._stopped or (self._waiting and not self._paused))
            if self._stopped:
                return []
            # Lower goes first; what came first goes first among equals.
            self._waiting.sort(key=lambda wish: wish.job.priority)
            self._calling, self._waiting = self._waiting[: self._batch], self._waiting[self._batch :]
            return self._calling

    def _call(self, calling: list[_Wish]) -> list[tuple[_Wish, Step]]:
        prompts = [self._make_prompt(list(wish.job.prompt)) for wish in calling]
        ends = self.tokenizer.end_ids
        try:
            params = [
                self._make_params(params_of(wish.job.sampling, ends, self._honoured)) for wish in calling
            ]
            outputs = list(self._executor.generate(prompts, params))
            if len(outputs) != len(calling):
                raise EngineFailed(f"The executor gave {len(outputs)} outputs for {len(calling)} prompts.")
        except DragomanError as error:
            return [(wish, wish.end("error", error)) for wish in calling]
        except Exception:
            _log.exception("the executor failed on a batch of %d", len(calling))
            failure = EngineFailed("The executor failed on the batch that this answer was in.")
            return [(wish, wish.end("error", failure)) for wish in calling]
        return [(wish, self._read(wish, output)) for wish, output in zip(calling, outputs, strict=True)]

    def _read(self, wish: _Wish, output: Any) -> Step:
        try:
            return step_of(output, wish.job, wish.index, len(self.tokenizer.pieces))
        except DragomanError as error:
            return wish.end("error", error)
        except Exception:
            _log.exception("an output of the executor cannot be read")
            return wish.end("error", EngineFailed("The executor gave an answer that cannot be read."))


class _Handle:
    __slots__ = ("_engine", "_wishes")

    def __init__(self, engine: RolloutEngine, wishes: list[_Wish]) -> None:
        self._engine = engine
        self._wishes = wishes

    def cancel(self, index: int | None = None) -> None:
        for wish in self._wishes if index is None else self._wishes[index : index + 1]:
            self._engine.drop(wish)
