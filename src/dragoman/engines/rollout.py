"""Executors that block, as trainers have them, as engines: what waits together goes in one call."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from threading import Condition, Thread
from typing import Any, Protocol

from msgspec.structs import replace

from dragoman.engines.protocol import UNSUPPORTABLE, ModelCard, TextTokenizer, Tokenizer, count_text
from dragoman.engines.steps import deliver, iterate, single
from dragoman.errors import BadRequest, DragomanError, EngineFailed, Unavailable
from dragoman.types import FinishReason, Job, Sampling, Sink, Step, TextStep, TokenLogprob

__all__ = ["RolloutEngine"]


# Sampling as executors take it: a dict with vLLM's names.


HONOURED = UNSUPPORTABLE - {
    "typical_p",
    "bad_words",
    "prompt_logprobs",
    "priority",
    "cache_salt",
    "reuse_prefix",
}
"""What a vLLM-shaped executor usually can do."""
_ALWAYS = ("temperature", "top_p")
_UNASKED = Sampling(max_tokens=0)


def params_of(sampling: Sampling, ends: frozenset[int], honoured: Collection[str]) -> dict[str, Any]:
    """What was asked, and nothing that was not: an executor has defaults of its own for the rest."""
    asked: dict[str, Any] = {"max_tokens": sampling.most}
    for name in sorted(honoured):
        value = getattr(sampling, name)
        if name in _ALWAYS or value != getattr(_UNASKED, name):
            asked[name] = _plain(value)
    if "stop_token_ids" in honoured and not sampling.ignore_eos:
        # Executors know one end of their own; the model may have several.
        asked["stop_token_ids"] = sorted(sampling.stop_token_ids | ends)
    return asked


def _plain(value: Any) -> Any:
    """Sets and tuples as lists, in an order that is always the same."""
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


# What an executor answers, read with care: nothing is filled in that it did not say.


_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def step_of(output: Any, job: Job, index: int, vocabulary: int) -> Step:
    """The one step of an answer. Objects and dicts will do; raises EngineFailed where something is amiss."""
    choices = _get(output, "outputs")
    if choices is not None and len(choices) != 1:
        raise EngineFailed(f"The executor gave {len(choices)} answers to one prompt.")
    answer = output if choices is None else choices[0]
    told, text = _get(answer, "token_ids"), _get(answer, "text")
    if told is None and not isinstance(text, str):
        raise EngineFailed("The executor gave an answer without token_ids or text.")
    reason = str(_get(answer, "finish_reason"))
    if reason not in _FINISHES:
        raise EngineFailed(f"The executor ended an answer for a reason that is not known: {reason}.")
    if told is None:
        return TextStep([], index, finish=_FINISHES[reason], text=text)
    ids, stop = _ids(told, job, vocabulary), _get(answer, "stop_reason")
    return Step(
        ids,
        index,
        logprobs=_logprobs(_get(answer, "logprobs"), ids, job.sampling.logprobs),
        finish=_FINISHES[reason],
        stop_id=stop if isinstance(stop, int) and stop in job.sampling.stop_token_ids else None,
    )


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _ids(told: Any, job: Job, vocabulary: int) -> list[int]:
    ids = [int(id_) for id_ in told]
    if any(not 0 <= id_ < vocabulary for id_ in ids):
        raise EngineFailed("The executor gave an id that is not in the vocabulary.")
    if len(ids) > job.sampling.max_tokens:
        raise EngineFailed(
            f"The executor gave {len(ids)} tokens where {job.sampling.max_tokens} were asked for."
        )
    return ids


def _logprobs(told: Any, ids: Sequence[int], top: int | None) -> list[TokenLogprob] | None:
    if top is None:
        return None
    if told is None or len(told) != len(ids):
        raise EngineFailed("The executor was asked for a log probability per token, and did not give that.")
    return [_entry(entry, id_, top) for entry, id_ in zip(told, ids, strict=True)]


def _entry(entry: Any, id_: int, top: int) -> TokenLogprob:
    """A number, or the likeliest ids with theirs, among which the chosen one is."""
    if not isinstance(entry, Mapping):
        return TokenLogprob(id_, _number(entry))
    known = {int(other): _number(value) for other, value in entry.items()}
    if id_ not in known:
        raise EngineFailed("The executor gave log probabilities in which the chosen token is missing.")
    best = sorted(known.items(), key=lambda pair: -pair[1])[:top]
    return TokenLogprob(id_, known[id_], tuple(best))


def _number(value: Any) -> float:
    return float(getattr(value, "logprob", value))


# An executor with a blocking `generate` as an engine: what waits together goes in one call.
#
# Steps come when a call returns, all ids of an answer at once. The thread that calls is not the event
# loop's, so streams begin at once, clients that leave are noticed, and nothing else stalls.


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

    Without a tokenizer prompts are text; an executor that answers in text is served either way. One that
    wants more than lists of ids, or texts, and dicts gets them from `make_prompt` and `make_params`:
    for vLLM's `LLM`, `lambda ids: {"prompt_token_ids": ids}` and `lambda params: SamplingParams(**params)`.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None,
        card: ModelCard,
        *,
        batch: int = 64,
        honoured: Collection[str] = HONOURED,
        make_prompt: Callable[[Any], Any] | None = None,
        make_params: Callable[[dict[str, Any]], Any] = dict,
        weight_version: str | None = None,
    ) -> None:
        if unknown := frozenset(honoured) - UNSUPPORTABLE:
            raise ValueError(f"not a field that can be honoured: {', '.join(sorted(unknown))}")
        has_ids = tokenizer is not None
        self.tokenizer = tokenizer or TextTokenizer(card.special_tokens)
        self.card = replace(
            card,
            # The queue is ours, so priorities are kept whatever the executor can do.
            unsupported=UNSUPPORTABLE - {"priority", *honoured},
            samples_ids=card.samples_ids and has_ids,
            has_ids=has_ids,
            takes_text=not has_ids,
        )
        self.weight_version = weight_version
        self._executor = executor
        self._batch = batch
        self._honoured = frozenset(honoured)
        self._make_prompt = make_prompt or (lambda prompt: prompt)
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

    def submit(self, job: Job, sink: Sink) -> "_RolloutHandle":
        """Queue a job; `sink` is called on the running event loop's thread."""
        if job.constraint is not None or job.adapter is not None:
            raise BadRequest("This engine takes neither constraints nor adapters.")
        loop = asyncio.get_running_loop()
        wishes = [_Wish(single(job, index), index, sink, loop) for index in range(job.n)]
        with self._change:
            self._start()
            self._waiting += wishes
            self._change.notify_all()
        return _RolloutHandle(self, wishes)

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
        takes_text = self.card.takes_text
        jobs = [wish.job for wish in calling]
        prompts = [self._make_prompt(job.text if takes_text else list(job.prompt)) for job in jobs]
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
            step = step_of(output, wish.job, wish.index, len(self.tokenizer.pieces))
            if isinstance(step, TextStep):
                # Here, because a whole answer takes a while to count.
                step.tokens = count_text(self.tokenizer, step.text)
                self.card.samples_ids = False
            return step
        except DragomanError as error:
            return wish.end("error", error)
        except Exception:
            _log.exception("an output of the executor cannot be read")
            return wish.end("error", EngineFailed("The executor gave an answer that cannot be read."))


class _RolloutHandle:
    __slots__ = ("_engine", "_wishes")

    def __init__(self, engine: RolloutEngine, wishes: list[_Wish]) -> None:
        self._engine = engine
        self._wishes = wishes

    def cancel(self, index: int | None = None) -> None:
        for wish in self._wishes if index is None else self._wishes[index : index + 1]:
            self._engine.drop(wish)
