"""Engines with `generate_request`, as tokenspeed's AsyncLLM and SGLang's Engine have it."""

import inspect
import logging
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from math import isnan
from typing import Any, get_args, get_type_hints

from msgspec import Struct

from dragoman.engines.hf_tokenizer import HfTokenizer
from dragoman.engines.protocol import UNSUPPORTABLE, ModelCard, Tokenizer
from dragoman.errors import BadRequest, DragomanError, EngineFailed, Overloaded, SettingsError, Unavailable
from dragoman.types import LARK_LINE, ConstraintSource, FinishReason, Job, SourceForm, Step, TokenLogprob

__all__ = ["AsyncLLMEngine"]


# How requests end: the finish reasons of the contract, and the errors that take their place.


logger = logging.getLogger("dragoman.engines")

MOST_MESSAGE = 500
_REFUSED = "The engine refused this request; the server's log says why."
_FAILED = "The engine failed while it was writing the answer."


def ending(reason: Any) -> tuple[FinishReason | None, DragomanError | None]:
    """Of a `finish_reason`: an object with a type, or its type alone. What is not known is an error."""
    if reason is None:
        return None, None
    told = reason.to_json() if hasattr(reason, "to_json") else reason
    if not isinstance(told, Mapping):
        told = {"type": told}
    match told.get("type"):
        case "stop":
            return "stop", None
        case "length":
            return "length", None
        case "abort" if told.get("status_code") is None:
            if told.get("message"):
                # Nobody's fault: why it was given up is for the log.
                logger.warning("The engine aborted a request: %s", told["message"])
            return "abort", None
        case "abort" | "error":
            return "error", _error(told.get("status_code") or 500, told.get("message"))
        case other:
            return "error", EngineFailed(
                f"The engine ended the answer for a reason that is not known: {other}."
            )


def is_refused(error: Exception, *, begun: bool) -> bool:
    """Whether an exception is about the request: it has a status, or came before anything was computed."""
    return _status(error) is not None or (isinstance(error, ValueError) and not begun)


def error_of(error: Exception) -> DragomanError:
    return _error(_status(error) or 400, None)


def _status(error: Exception) -> int | None:
    status = getattr(error, "status_code", None)
    return int(status) if isinstance(status, int) and 400 <= status < 600 else None


def _error(status: int, message: Any) -> DragomanError:
    """The engine's words reach the client where the client is at fault, and the log where the engine is."""
    if status >= 500:
        logger.error("The engine gave up a request with status %s: %s", int(status), message)
        return (
            Unavailable("The engine cannot take this request now; try again.")
            if status == 503
            else EngineFailed(_FAILED)
        )
    said = message[:MOST_MESSAGE] if isinstance(message, str) and message else _REFUSED
    return Overloaded(said) if status == 429 else BadRequest(said)


# What an AsyncLLM-shaped engine is asked: by its own request class where it shows one, else by one like it.
#
# The engine's package is not imported. Its class is found by `engine.request_class`, or by the annotation
# of `generate_request`; which names its sampling parameters have, by the `SamplingParams` beside that
# class.


class GenerateRequest(Struct, kw_only=True):
    """For engines that take any object with these attributes."""

    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool = True
    text: str | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    lora_path: str | None = None
    priority: int | None = None
    is_single: bool = True

    def normalize_batch_and_arguments(self) -> None:
        """Engines call it; a request for one prompt is as it should be."""


_SAMPLING = {
    "max_tokens": ("max_new_tokens",),
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "min_p": ("min_p",),
    "typical_p": (),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    "repetition_penalty": ("repetition_penalty",),
    "logit_bias": ("logit_bias",),
    "bad_words": (),
    "allowed_token_ids": (),
    "stop_token_ids": ("stop_token_ids",),
    "min_tokens": ("min_new_tokens",),
    "ignore_eos": ("ignore_eos",),
    "seed": ("seed", "sampling_seed"),
}
"""Names of the engines for the fields of Sampling; without one, a field is not supported."""
_REQUEST = {
    "logprobs": ("return_logprob",),
    "prompt_logprobs": ("logprob_start_len",),
    "priority": ("priority",),
    "cache_salt": ("cache_salt", "extra_key"),
    "reuse_prefix": ("cache_salt", "extra_key"),
}
"""The same for what stands in the request itself."""
CONSTRAINTS: dict[SourceForm, str] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "gbnf": "ebnf",
    "lark": "ebnf",
    "structural_tag": "structural_tag",
}
_USUAL = frozenset(name for names in _SAMPLING.values() for name in names[:1]) | frozenset(
    CONSTRAINTS.values()
)


class Form(Struct, frozen=True):
    """How requests to one engine are written."""

    make: Callable[..., Any]
    takes: frozenset[str]
    """What the class is called with."""
    has: frozenset[str]
    """What its objects have; ids are often set by their engine alone, and can be overwritten."""
    sampling: frozenset[str]
    low_first: bool = False
    """Whether a low priority goes first."""
    reasons: bool = False
    """Whether the engine knows where reasoning ends."""
    ranks: bool = True
    """Whether the engine goes by priorities."""

    @property
    def skips_reasoning(self) -> bool:
        return self.reasons and "require_reasoning" in self.has

    @property
    def unsupported(self) -> frozenset[str]:
        """Fields of jobs that there is no name for."""
        missing = {name for name, theirs in _SAMPLING.items() if self.sampling.isdisjoint(theirs)}
        missing |= {name for name, theirs in _REQUEST.items() if self.has.isdisjoint(theirs)}
        return UNSUPPORTABLE & (missing if self.ranks else missing | {"priority"})

    def request(self, job: Job) -> Any:
        values = {name: value for name, value in self._values(job).items() if name in self.has}
        made = self.make(**{name: value for name, value in values.items() if name in self.takes})
        for name in values.keys() - self.takes:
            setattr(made, name, values[name])
        return made

    def _values(self, job: Job) -> dict[str, Any]:
        sampling, source = job.sampling, _source(job)
        values: dict[str, Any] = {
            # With an end of its own: engines abort every request whose id begins with the one they are given.
            "rid": f"{job.id}.",
            "input_ids": list(job.prompt),
            "sampling_params": self._sampling(job),
            "stream": True,
            "return_logprob": sampling.logprobs is not None or sampling.prompt_logprobs is not None,
            "top_logprobs_num": max(sampling.logprobs or 0, sampling.prompt_logprobs or 0),
            "logprob_start_len": -1 if sampling.prompt_logprobs is None else 0,
        }
        if job.adapter is not None:
            values["lora_path"] = job.adapter
        if job.priority:
            values["priority"] = job.priority if self.low_first else -job.priority
        if job.cache_salt or not job.reuse_prefix:
            # What has a salt of its own shares nothing.
            salt = job.cache_salt if job.reuse_prefix else job.id
            values["cache_salt" if "cache_salt" in self.has else "extra_key"] = salt
        if source is not None and source.after_reasoning:
            values["require_reasoning"] = True
        return values

    def _sampling(self, job: Job) -> dict[str, Any]:
        params: dict[str, Any] = {}
        for ours, theirs in _SAMPLING.items():
            value = _spell_params(ours, getattr(job.sampling, ours))
            name = next((one for one in theirs if one in self.sampling), None)
            if name is not None and value is not None:
                params[name] = value
        source = _source(job)
        if source is not None:
            # The first line says which notation it is, whatever the others look like.
            head = LARK_LINE if source.form == "lark" else ""
            params[CONSTRAINTS[source.form]] = head + source.text
        return params


def _source(job: Job) -> ConstraintSource | None:
    return job.constraint.source if job.constraint is not None else None


def _spell_params(name: str, value: Any) -> Any:
    match name:
        case "top_k":
            return value or -1
        case "logit_bias":
            return {str(id_): bias for id_, bias in value.items()} or None
        case "stop_token_ids":
            return sorted(value) or None
    return value


def form_of(manager: Any) -> Form:
    own = _request_class(manager) or GenerateRequest
    takes = frozenset(inspect.signature(own).parameters)
    sampling = getattr(sys.modules.get(own.__module__), "SamplingParams", None)
    args = getattr(manager, "server_args", None)
    return Form(
        own,
        takes,
        takes | _read_annotations(own),
        frozenset(inspect.signature(sampling).parameters) if sampling is not None else _USUAL,
        low_first=bool(getattr(args, "schedule_low_priority_values_first", False)),
        reasons=getattr(args, "reasoning_parser", None) is not None,
        ranks=bool(getattr(args, "enable_priority_scheduling", True)),
    )


def _request_class(manager: Any) -> type | None:
    """The one that the engine names, or the one for generating among the types of its first argument."""
    named: type | None = getattr(manager, "request_class", None)
    if named is not None:
        return named
    try:
        hints = get_type_hints(manager.generate_request)
    except Exception:
        # An annotation that cannot be looked up tells nothing.
        return None
    hint = next((hint for name, hint in hints.items() if name != "return"), None)
    candidates = [one for one in get_args(hint) or (hint,) if isinstance(one, type)]
    return next(
        (one for one in candidates if {"input_ids", "sampling_params", "stream"} <= _read_annotations(one)),
        None,
    )


def _read_annotations(cls: type) -> frozenset[str]:
    return frozenset(name for base in cls.__mro__ for name in inspect.get_annotations(base))


# What an AsyncLLM-shaped engine shows of itself and of its model.


_UNREAD: dict[str, set[SourceForm]] = {
    "none": set(CONSTRAINTS),
    "outlines": {"gbnf", "lark", "structural_tag"},
    # Ours, as it is for the embedded engine, says everything.
    "llguidance": set(CONSTRAINTS) - {"lark"},
}
"""Forms that a backend for constraints does not read; all others know no Lark."""


def manager_of(engine: Any) -> Any:
    """What takes requests: the engine, or its tokenizer manager."""
    for candidate in _parts(engine):
        if hasattr(candidate, "generate_request"):
            return candidate
    raise SettingsError(f"{type(engine).__name__} has no generate_request, so it cannot be served.")


def name_of(engine: Any) -> str:
    return str(_first(engine, "served_model_name", "server_args.served_model_name", "model_path") or "model")


def length_of(engine: Any, tokenizer: Tokenizer) -> int:
    told = _first(engine, "context_len", "model_config.context_len", "max_model_len")
    found = told or getattr(tokenizer, "longest", None)
    if found is None:
        raise SettingsError("The engine does not say how long its context is; give max_model_len.")
    return int(found)


def tokenizer_of(engine: Any, given: Any) -> Tokenizer:
    """What was given, else the engine's own; one of Hugging Face is taken apart."""
    found = given if given is not None else _first(engine, "tokenizer")
    if found is None and hasattr(engine, "get_tokenizer"):
        found = engine.get_tokenizer()
    if found is None:
        raise SettingsError("The engine has no tokenizer; give one.")
    if isinstance(found, Tokenizer):
        return found
    ends, size = _first(engine, "model_config.hf_eos_token_id"), _first(engine, "model_config.vocab_size")
    return HfTokenizer(found, size=size, end_ids=ends or ())


def sources_of(engine: Any, form: Form) -> tuple[SourceForm, ...]:
    """The forms of constraints for which there is a field, as far as the engine's backend reads them."""
    unread = _UNREAD.get(_first(engine, "server_args.grammar_backend"), {"lark"})
    return tuple(
        form_ for form_, field in CONSTRAINTS.items() if field in form.sampling and form_ not in unread
    )


def _parts(engine: Any) -> list[Any]:
    manager = getattr(engine, "tokenizer_manager", None)
    return [engine] if manager is None else [engine, manager]


def _first(engine: Any, *paths: str) -> Any:
    """The first of these attributes that is there and not None."""
    for path in paths:
        for found in _parts(engine):
            for name in path.split("."):
                found = getattr(found, name, None)
            if found is not None:
                return found
    return None


# What an engine yields for one request, as steps. Ids are what counts; the text beside them is not read.


class OutputReader:
    """Reads the outputs of one request, in order."""

    def __init__(self, job: Job) -> None:
        self.begun = False
        self.over = False
        self._job = job
        self._told: list[int] = []

    def step(self, output: Mapping[str, Any]) -> Step:
        meta: Mapping[str, Any] = output.get("meta_info") or {}
        first, self.begun = not self.begun, True
        finish, error = ending(meta.get("finish_reason"))
        self.over = finish is not None
        seen = len(self._told)
        ids = self._new(output.get("output_ids") or (), meta.get("completion_tokens"))
        step = Step(ids, finish=finish, error=error)
        if finish == "stop" and ids and ids[-1] in self._job.sampling.stop_token_ids:
            step.stop_id = ids[-1]
        if self._job.sampling.logprobs is not None:
            step.logprobs = _logprobs(ids, seen, meta, self._job.sampling.logprobs)
        if first:
            step.cached_tokens = meta.get("cached_tokens")
            if self._job.sampling.prompt_logprobs is not None and error is None:
                step.prompt_logprobs = _of_prompt(self._job, meta)
        version = meta.get("weight_version")
        step.weight_version = None if version is None else str(version)
        return step

    def _new(self, ids: Sequence[int], count: int | None) -> list[int]:
        """What was not there before. Some engines give all ids each time, although they were asked to stream:
        then there are more than the count has grown by, and they begin with those that are known. It may be
        the list that the engine still adds to, so what is beyond the count belongs to the next output."""
        seen = len(self._told)
        if count is not None and len(ids) > count - seen and list(ids[:seen]) == self._told:
            ids = ids[seen:] if self.over else ids[seen:count]
        new = [int(id_) for id_ in ids]
        self._told += new
        return new


def _logprobs(ids: list[int], seen: int, meta: Mapping[str, Any], most: int) -> list[TokenLogprob]:
    """Of the new ids, after those that were seen."""
    size = len(ids)
    own = _part(meta.get("output_token_logprobs"), seen, size)
    tops = _part(meta.get("output_top_logprobs"), seen, size) if most else [()] * size
    made = [_entry(told, top, most) for told, top in zip(own, tops, strict=True)]
    if [entry.id for entry in made] != ids:
        raise EngineFailed("The engine's log probabilities are of other tokens than it gave.")
    return made


def _of_prompt(job: Job, meta: Mapping[str, Any]) -> list[TokenLogprob | None]:
    most = job.sampling.prompt_logprobs or 0
    # Nothing precedes the first id; engines say None there, or nothing.
    size = len(job.prompt) - 1
    own = _part(meta.get("input_token_logprobs"), 1, size)
    tops = _part(meta.get("input_top_logprobs"), 1, size) if most else [()] * size
    return [None, *(_entry(told, top, most) for told, top in zip(own, tops, strict=True))]


def _part(entries: Sequence[Any] | None, before: int, size: int) -> Sequence[Any]:
    """The entries after the first ones; if those are not in the list, all of it."""
    told = entries or ()
    start = before if len(told) >= before + size else 0
    if len(told) < size:
        raise EngineFailed("The engine gave no log probabilities for some tokens.")
    return told[start : start + size]


def _entry(told: Sequence[Any], top: Sequence[Sequence[Any]] | None, most: int) -> TokenLogprob:
    others = tuple((int(id_), _number(logprob)) for logprob, id_, *_ in (top or ())[:most])
    return TokenLogprob(int(told[1]), _number(told[0]), others)


def _number(logprob: Any) -> float:
    if logprob is None or isnan(logprob):
        raise EngineFailed("The engine gave a log probability that is not a number.")
    return float(logprob)


# An AsyncLLM-shaped engine as an Engine: requests out, steps back, and an abort on every other way out.


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
            if is_refused(error, begun=reader.begun):
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
