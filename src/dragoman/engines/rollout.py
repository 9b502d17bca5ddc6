"""Engines from blocking executors, as trainers have them: waiting jobs are batched into one call."""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from functools import partial
from threading import Condition, Thread
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from dragoman.engines.protocol import OPTIONAL_FIELDS, FallbackTokenizer, ModelCard, Tokenizer, count_text
from dragoman.engines.steps import deliver_steps, iterate, single
from dragoman.errors import BadRequest, DragomanError, EngineFailed, Unavailable
from dragoman.types import FinishReason, Job, Sampling, Sink, Step, TextStep, TokenLogprob

__all__ = ["RolloutEngine"]


# Sampling parameters as executors take them: a dict with vLLM's names.


HONOURED = OPTIONAL_FIELDS - {
    "typical_p",
    "bad_words",
    "prompt_logprobs",
    "priority",
    "cache_salt",
    "reuse_prefix",
}
"""Fields that an executor with vLLM's interface usually supports."""
_ALWAYS = ("temperature", "top_p")
_UNASKED = Sampling(max_tokens=0)


def params_of(sampling: Sampling, ends: frozenset[int], honoured: Collection[str]) -> dict[str, Any]:
    """Return the parameters that the request set; for the rest the executor has its own defaults."""
    asked: dict[str, Any] = {"max_tokens": sampling.max_tokens_or_none}
    for name in sorted(honoured):
        value = getattr(sampling, name)
        if name in _ALWAYS or value != getattr(_UNASKED, name):
            asked[name] = _plain(value)
    if "stop_token_ids" in honoured and not sampling.ignore_eos:
        # Executors know one end id; the model may have several.
        asked["stop_token_ids"] = sorted(sampling.stop_token_ids | ends)
    return asked


def _plain(value: Any) -> Any:
    """Convert sets and tuples to lists, in a stable order."""
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


# Parsing of an executor's outputs; missing values are never made up.


_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def step_of(output: Any, job: Job, index: int, vocabulary: int) -> Step:
    """Convert an output, an object or a dict, to the one step of an answer. Raises EngineFailed if it is
    malformed.

    Without a vocabulary the text is the answer, and ids beside it only give its token count.
    """
    choices = _get(output, "outputs")
    if choices is not None and len(choices) != 1:
        raise EngineFailed(f"The executor returned {len(choices)} answers to one prompt.")
    answer = output if choices is None else choices[0]
    result, text = _get(answer, "token_ids"), _get(answer, "text")
    if result is None and not isinstance(text, str):
        raise EngineFailed("The executor returned an answer without token_ids or text.")
    reason = str(_get(answer, "finish_reason"))
    if reason not in _FINISHES:
        raise EngineFailed(f"The executor ended an answer with an unknown finish reason: {reason}.")
    if result is None or not vocabulary:
        known = _get(answer, "prompt_tokens") or len(_get(answer, "prompt_token_ids") or ()) or None
        count = len(result) if result is not None else _get(answer, "completion_tokens") or 0
        finish = _FINISHES[reason]
        return TextStep([], index, finish=finish, text=text or "", tokens=count, prompt_tokens=known)
    ids, stop = _ids(result, job, vocabulary), _get(answer, "stop_reason")
    return Step(
        ids,
        index,
        logprobs=_logprobs(_get(answer, "logprobs"), ids, job.sampling.logprobs),
        finish=_FINISHES[reason],
        stop_id=stop if isinstance(stop, int) and stop in job.sampling.stop_token_ids else None,
    )


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _ids(result: Any, job: Job, vocabulary: int) -> list[int]:
    ids = [int(id_) for id_ in result]
    if any(not 0 <= id_ < vocabulary for id_ in ids):
        raise EngineFailed("The executor returned an id that is not in the vocabulary.")
    if len(ids) > job.sampling.max_tokens:
        raise EngineFailed(
            f"The executor returned {len(ids)} tokens; max_tokens is {job.sampling.max_tokens}."
        )
    return ids


def _logprobs(result: Any, ids: Sequence[int], top: int | None) -> list[TokenLogprob] | None:
    if top is None:
        return None
    if result is None or len(result) != len(ids):
        raise EngineFailed("The executor did not return the requested log probability of each token.")
    return [_entry(entry, id_, top) for entry, id_ in zip(result, ids, strict=True)]


def _entry(entry: Any, id_: int, top: int) -> TokenLogprob:
    """Convert a number, or a mapping of the likeliest ids, which includes the sampled one."""
    if not isinstance(entry, Mapping):
        return TokenLogprob(id_, _number(entry))
    known = {int(other): _number(value) for other, value in entry.items()}
    if id_ not in known:
        raise EngineFailed("The executor's log probabilities do not include the sampled token.")
    best = sorted(known.items(), key=lambda pair: -pair[1])[:top]
    return TokenLogprob(id_, known[id_], tuple(best))


def _number(value: Any) -> float:
    return float(getattr(value, "logprob", value))


# An engine around an executor with a blocking `generate`: waiting jobs are batched into one call.
#
# Steps come when a call returns, all ids of an answer at once. A separate thread makes the calls, so the
# event loop can start streams and notice disconnects meanwhile.


_log = logging.getLogger("dragoman.engine")


class Executor(Protocol):
    def generate(self, prompts: list[Any], sampling_params: list[Any]) -> Sequence[Any]:
        """Return one output per prompt, in order, with `outputs[0].token_ids`, `.finish_reason` and
        `.logprobs`.
        """


class _QueuedContinuation:
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
    """Engine around a blocking executor. `honoured` are the fields that the executor supports; a request that
    uses another one is refused.

    Without a tokenizer prompts are text; an executor may answer in text either way. Prompts are lists of ids
    or texts, and parameters are dicts, unless `make_prompt` and `make_params` convert them: for vLLM's `LLM`,
    `lambda ids: {"prompt_token_ids": ids}` and `lambda params: SamplingParams(**params)`.
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
        takes_text: bool = False,
    ) -> None:
        """With `takes_text` prompts and answers are text even if there is a tokenizer."""
        if unknown := frozenset(honoured) - OPTIONAL_FIELDS:
            raise ValueError(f"honoured has unknown fields: {', '.join(sorted(unknown))}")
        has_ids = tokenizer is not None
        self.tokenizer = tokenizer or FallbackTokenizer(card.special_tokens)
        self.card = replace(
            card,
            # The queue is here, so priorities work with any executor.
            unsupported=OPTIONAL_FIELDS - {"priority", *honoured},
            returns_ids=card.returns_ids and has_ids and not takes_text,
            has_tokenizer=has_ids,
            wants_prompt_text=takes_text or not has_ids,
        )
        self.weight_version = weight_version
        self._executor = executor
        self._batch = batch
        self._honoured = frozenset(honoured)
        self._make_prompt = make_prompt or (lambda prompt: prompt)
        self._make_params = make_params
        self._change = Condition()
        self._waiting: list[_QueuedContinuation] = []
        self._calling: list[_QueuedContinuation] = []
        self._paused = False
        self._stopped = False
        self._thread: Thread | None = None

    @property
    def live(self) -> int:
        """Continuations that are waiting or being computed, and not cancelled."""
        return sum(not wish.over for wish in (*self._waiting, *self._calling))

    def submit(self, job: Job, sink: Sink) -> "_RolloutHandle":
        """Queue a job; `sink` is called on the running event loop's thread."""
        if job.constraint is not None or job.adapter is not None:
            raise BadRequest("This engine supports neither constraints nor adapters.")
        loop = asyncio.get_running_loop()
        wishes = [_QueuedContinuation(single(job, index), index, sink, loop) for index in range(job.n)]
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
        """End waiting jobs with finish "abort", and return when the running call has ended."""
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
        """Continue, and set the version of the weights if one is given."""
        with self._change:
            self.weight_version = weight_version or self.weight_version
            self._paused = False
            self._change.notify_all()

    def drop(self, wish: _QueuedContinuation) -> None:
        """Drop a continuation. A waiting one leaves the queue; one in a call is computed to its end and
        discarded.
        """
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
            items = self._call(calling)
            for _, step in items:
                step.weight_version = version
            with self._change:
                self._calling = []
                self._change.notify_all()
            deliver_steps([entry for entry in items if not entry[0].over], self.drop)
        left, self._waiting = self._waiting, []
        deliver_steps([(wish, wish.end("abort")) for wish in left], self.drop)

    def _next(self) -> list[_QueuedContinuation]:
        """Wait for work and return the continuations of the next call; an empty list after `stop`."""
        with self._change:
            self._change.wait_for(lambda: self._stopped or (self._waiting and not self._paused))
            if self._stopped:
                return []
            # A lower priority value goes first; equal ones go in order of arrival.
            self._waiting.sort(key=lambda wish: wish.job.priority)
            self._calling, self._waiting = self._waiting[: self._batch], self._waiting[self._batch :]
            return self._calling

    def _call(self, calling: list[_QueuedContinuation]) -> list[tuple[_QueuedContinuation, Step]]:
        takes_text = self.card.wants_prompt_text
        jobs = [wish.job for wish in calling]
        prompts = [self._make_prompt(job.text if takes_text else list(job.prompt)) for job in jobs]
        ends = self.tokenizer.end_ids
        try:
            params = [
                self._make_params(params_of(wish.job.sampling, ends, self._honoured)) for wish in calling
            ]
            outputs = list(self._executor.generate(prompts, params))
            if len(outputs) != len(calling):
                raise EngineFailed(
                    f"The executor returned {len(outputs)} outputs for {len(calling)} prompts."
                )
        except DragomanError as error:
            return [(wish, wish.end("error", error)) for wish in calling]
        except Exception:
            _log.exception("The executor failed on a batch of %d", len(calling))
            failure = EngineFailed("The executor failed on the batch of this answer.")
            return [(wish, wish.end("error", failure)) for wish in calling]
        return [(wish, self._read(wish, output)) for wish, output in zip(calling, outputs, strict=True)]

    def _read(self, wish: _QueuedContinuation, output: Any) -> Step:
        try:
            vocabulary = 0 if self.card.wants_prompt_text else len(self.tokenizer.pieces)
            step = step_of(output, wish.job, wish.index, vocabulary)
            if isinstance(step, TextStep):
                # Counted in this thread, because counting a whole answer takes a while.
                step.tokens = step.tokens or count_text(self.tokenizer, step.text)
                self.card.returns_ids = False
            return step
        except DragomanError as error:
            return wish.end("error", error)
        except Exception:
            _log.exception("Cannot parse an output of the executor")
            return wish.end("error", EngineFailed("The executor returned an output that cannot be parsed."))


class _RolloutHandle:
    __slots__ = ("_engine", "_wishes")

    def __init__(self, engine: RolloutEngine, wishes: list[_QueuedContinuation]) -> None:
        self._engine = engine
        self._wishes = wishes

    def cancel(self, index: int | None = None) -> None:
        for wish in self._wishes if index is None else self._wishes[index : index + 1]:
            self._engine.drop(wish)


# Executors as RL-Kernel has them, and similar ones, recognized by the parameters of their method. Each takes
# all prompts with the same sampling, so other sampling parameters need another call.
#
#     generate_candidates(prompts, *, num_generations, sampling_params)    candidates with ids and text
#     generate(prompts, *, n, max_tokens, temperature, ...)                texts: its CompletionBackend
#     generate(prompts, sampling_params)                                   vLLM's LLM


_BY_NAME = frozenset({"top_k", "repetition_penalty"})
"""Parameters that a backend takes in `extra`."""


class ExecutorInterface(Struct, frozen=True):
    """How an executor is called: the arguments for its `RolloutEngine`."""

    executor: Executor
    supported_fields: Collection[str] = HONOURED
    takes_text: bool = False
    make_prompt: Callable[[Any], Any] | None = None
    make_params: Callable[[dict[str, Any]], Any] = dict


def executor_interface(thing: Any) -> ExecutorInterface | None:
    """Recognize an executor's interface; None if it is not an executor, or is an engine with its own card."""
    if isinstance(thing, type) or hasattr(thing, "card") or hasattr(thing, "generate_request"):
        return None
    names = _list_parameters(getattr(thing, "generate", None))
    candidates = thing.generate if "num_generations" in names else None
    candidates = getattr(thing, "generate_candidates", candidates)
    if candidates is not None:
        return ExecutorInterface(_GroupedExecutor(partial(_ask_candidates, candidates)), make_prompt=_as_vllm)
    if not names or names[0] != "prompts":
        return None
    if "max_tokens" in names:
        honoured = {"temperature", "top_p"}.intersection(names) | (_BY_NAME if "extra" in names else set())
        asking = partial(_ask_backend, thing.generate, frozenset(names))
        return ExecutorInterface(_GroupedExecutor(asking), supported_fields=honoured, takes_text=True)
    if type(thing).__module__.partition(".")[0] == "vllm":
        from vllm import SamplingParams

        return ExecutorInterface(
            thing, make_prompt=_as_vllm, make_params=lambda asked: SamplingParams(**asked)
        )
    return ExecutorInterface(thing)


def wrap_executor(
    thing: Any,
    shape: ExecutorInterface,
    tokenizer: Any = None,
    chat_template: str | None = None,
    model_name: str | None = None,
    max_model_len: int | None = None,
    *,
    special_tokens: Mapping[str, str] | None = None,
    batch: int = 64,
) -> RolloutEngine:
    """Create an engine from an executor. Arguments left out are read from the executor where possible."""
    from dragoman.engines.asyncllm import tokenizer_of

    result = tokenizer_of(thing, tokenizer or getattr(getattr(thing, "sampler", None), "tokenizer", None))
    named = getattr(thing, "model_id", None) or _get(getattr(thing, "config", None), "model")
    card = ModelCard(
        name=model_name or str(named or "rollout"),
        max_model_len=max_model_len or getattr(result, "longest", None),
        templates=getattr(result, "templates", {}) if chat_template is None else {"default": chat_template},
        special_tokens={**getattr(result, "special_tokens", {}), **(special_tokens or {})},
    )
    return RolloutEngine(
        shape.executor,
        result,
        card,
        batch=batch,
        honoured=shape.supported_fields,
        make_prompt=shape.make_prompt,
        make_params=shape.make_params,
        takes_text=shape.takes_text,
    )


class _GroupedExecutor:
    """Executor that makes one call for each distinct set of parameters among the prompts."""

    def __init__(self, ask: Callable[[list[Any], dict[str, Any]], Sequence[Any]]) -> None:
        self._ask = ask

    def generate(self, prompts: list[Any], sampling_params: list[dict[str, Any]]) -> Sequence[Any]:
        groups: dict[str, list[int]] = {}
        for index, params in enumerate(sampling_params):
            groups.setdefault(repr(sorted(params.items())), []).append(index)
        outputs: dict[int, Any] = {}
        for indices in groups.values():
            items = self._ask([prompts[position] for position in indices], sampling_params[indices[0]])
            if len(items) != len(indices):
                raise EngineFailed(f"The executor returned {len(items)} outputs for {len(indices)} prompts.")
            outputs.update(zip(indices, map(_take_only, items), strict=True))
        return [outputs[row] for row in range(len(prompts))]


def _ask_candidates(ask: Callable[..., Any], prompts: list[Any], params: dict[str, Any]) -> Sequence[Any]:
    result = ask(prompts, num_generations=1, sampling_params=params)
    value = (
        result.get("normalized_outputs") or result.get("outputs") if isinstance(result, Mapping) else result
    )
    return list(value or ())


def _ask_backend(
    ask: Callable[..., Any], names: frozenset[str], prompts: list[Any], params: dict[str, Any]
) -> Sequence[Any]:
    extra = {name: params[name] for name in sorted(_BY_NAME & params.keys())}
    fields = {"n": 1, "stop": None, "extra": extra or None, **params}
    return list(ask(prompts, **{name: fields[name] for name in fields.keys() & names}))


def _take_only(group: Any) -> Any:
    """Return the one answer to a prompt. Without a finish reason it counts as finished."""
    answers = group if isinstance(group, list | tuple) else [group]
    if len(answers) != 1:
        raise EngineFailed(f"The executor returned {len(answers)} answers to one prompt.")
    answer = {"text": answers[0]} if isinstance(answers[0], str) else answers[0]
    if _get(answer, "outputs") is not None or _get(answer, "finish_reason") is not None:
        return answer
    names = ("token_ids", "text", "logprobs", "prompt_token_ids")
    return {"finish_reason": "stop", **{name: _get(answer, name) for name in names}}


def _as_vllm(prompt: Any) -> Any:
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}


def _list_parameters(method: Any) -> list[str]:
    try:
        return list(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return []
