"""Engines with `generate_request`, such as tokenspeed's AsyncLLM and SGLang's Engine."""

import asyncio
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from math import hypot
from typing import Any, get_args, get_type_hints

from msgspec import Struct

from dragoman.engines.hf_tokenizer import HfTokenizer
from dragoman.engines.protocol import OPTIONAL_FIELDS, FallbackTokenizer, ModelCard, Tokenizer, placeholder_id
from dragoman.engines.steps import OutputMode, OutputReader, client_error, is_refused
from dragoman.errors import EngineFailed, ModelFileError, SettingsError
from dragoman.media import Media, MediaKind
from dragoman.media.headers import data_url
from dragoman.types import LARK_LINE, UNBOUNDED, ConstraintFormat, ConstraintSource, Job, Step

__all__ = ["AsyncLLMEngine"]

logger = logging.getLogger("dragoman.engines")


# Requests to such an engine: objects of its own request class if it can be found, else of `GenerateRequest`.
#
# The engine's package is not imported. The class is `engine.request_class`, or comes from the annotation of
# `generate_request`; the names of sampling parameters come from `SamplingParams` in the same module.


class GenerateRequest(Struct, kw_only=True):
    """Request for engines that accept any object with these attributes."""

    rid: str
    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: dict[str, Any]
    stream: bool = True
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    lora_path: str | None = None
    priority: int | None = None
    is_single: bool = True

    def normalize_batch_and_arguments(self) -> None:
        """No-op that engines call; a request for one prompt is normal already."""


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
"""The engines' names for the fields of Sampling; a field without one is not supported."""
_REQUEST = {
    "logprobs": ("return_logprob",),
    "prompt_logprobs": ("logprob_start_len",),
    "priority": ("priority",),
    "cache_salt": ("cache_salt", "extra_key"),
    "reuse_prefix": ("cache_salt", "extra_key"),
}
"""The engines' names for fields that are attributes of the request itself."""
CONSTRAINTS: dict[ConstraintFormat, str] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "gbnf": "ebnf",
    "lark": "ebnf",
    "structural_tag": "structural_tag",
}
_USUAL = frozenset(name for names in _SAMPLING.values() for name in names[:1]) | frozenset(
    CONSTRAINTS.values()
)
_MEDIA: Mapping[MediaKind, str] = {"image": "image_data", "audio": "audio_data"}


class RequestFormat(Struct, frozen=True):
    """How requests to one engine are built."""

    make: Callable[..., Any]
    takes: frozenset[str]
    """Arguments of the request class."""
    has: frozenset[str]
    """Attributes of its objects. Some are not arguments, as the engine sets them itself; they are
    overwritten.
    """
    sampling: frozenset[str]
    low_first: bool = False
    """Whether a lower priority value goes first."""
    reasons: bool = False
    """Whether the engine knows where reasoning ends."""
    ranks: bool = True
    """Whether the engine schedules by priority."""
    takes_ids: bool = True
    """Whether prompts are sent as ids; if not, as text."""

    @property
    def takes_text(self) -> bool:
        """Whether requests carry the text: `GenerateRequest` has text beside ids, other classes refuse
        both together.
        """
        return not self.takes_ids or self.make is GenerateRequest

    @property
    def skips_reasoning(self) -> bool:
        return self.reasons and "require_reasoning" in self.has

    @property
    def unsupported(self) -> frozenset[str]:
        """Job fields that the engine has no name for."""
        missing = {name for name, theirs in _SAMPLING.items() if self.sampling.isdisjoint(theirs)}
        missing |= {name for name, theirs in _REQUEST.items() if self.has.isdisjoint(theirs)}
        return OPTIONAL_FIELDS & (missing if self.ranks else missing | {"priority"})

    def request(self, job: Job) -> Any:
        values = {name: value for name, value in self._values(job).items() if name in self.has}
        result = self.make(**{name: value for name, value in values.items() if name in self.takes})
        for name in values.keys() - self.takes:
            setattr(result, name, values[name])
        return result

    def _values(self, job: Job) -> dict[str, Any]:
        sampling, source = job.sampling, _source(job)
        values: dict[str, Any] = {
            # With a "." at its end: engines abort every request whose id begins with the given one.
            "rid": f"{job.id}.",
            "input_ids": list(job.prompt) if self.takes_ids else None,
            "text": job.text if self.takes_text else None,
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
            # A unique salt shares no prefix cache.
            salt = job.cache_salt if job.reuse_prefix else job.id
            values["cache_salt" if "cache_salt" in self.has else "extra_key"] = salt
        if source is not None and source.after_reasoning:
            values["require_reasoning"] = True
        for span in job.media:
            values.setdefault(_MEDIA[span.media.kind], []).append(data_url(span.media))
        return values

    def _sampling(self, job: Job) -> dict[str, Any]:
        params: dict[str, Any] = {}
        if "skip_special_tokens" in self.sampling:
            # Where the answer is text, it must include the markers.
            params["skip_special_tokens"] = False
        for ours, theirs in _SAMPLING.items():
            value = _spell_params(ours, getattr(job.sampling, ours))
            name = next((one for one in theirs if one in self.sampling), None)
            if name is not None and (value is not None or ours == "max_tokens"):
                # None lets the engine use its whole context; without the field, many default to a small
                # number.
                params[name] = value
        source = _source(job)
        if source is not None:
            # A first line that names the notation, so that the engine does not have to guess it.
            head = LARK_LINE if source.format == "lark" else ""
            params[CONSTRAINTS[source.format]] = head + source.text
        return params


def _source(job: Job) -> ConstraintSource | None:
    return job.constraint.source if job.constraint is not None else None


def _spell_params(name: str, value: Any) -> Any:
    match name:
        case "max_tokens":
            return None if value == UNBOUNDED else value
        case "top_k":
            return value or -1
        case "logit_bias":
            return {str(id_): bias for id_, bias in value.items()} or None
        case "stop_token_ids":
            return sorted(value) or None
    return value


def form_of(manager: Any, *, has_ids: bool = True) -> RequestFormat:
    own = _request_class(manager) or GenerateRequest
    takes = frozenset(inspect.signature(own).parameters)
    sampling = getattr(sys.modules.get(own.__module__), "SamplingParams", None)
    args = getattr(manager, "server_args", None)
    return RequestFormat(
        own,
        takes,
        takes | _read_annotations(own),
        frozenset(inspect.signature(sampling).parameters) if sampling is not None else _USUAL,
        low_first=bool(getattr(args, "schedule_low_priority_values_first", False)),
        reasons=getattr(args, "reasoning_parser", None) is not None,
        ranks=bool(getattr(args, "enable_priority_scheduling", True)),
        takes_ids=has_ids and "input_ids" in takes | _read_annotations(own),
    )


def _request_class(manager: Any) -> type | None:
    """Return the class that the engine names, or the generation request among the types of its first
    argument.
    """
    named: type | None = getattr(manager, "request_class", None)
    if named is not None:
        return named
    for one in _argument_types(manager.generate_request):
        names = _read_annotations(one)
        if {"sampling_params", "stream"} <= names and names & {"input_ids", "text"}:
            return one
    return None


def _embedding_class(manager: Any) -> type | None:
    """Return the embedding request among the types of its first argument."""
    types = _argument_types(manager.generate_request)
    return next((one for one in types if "Embedding" in one.__name__), None)


def _argument_types(method: Any) -> list[type]:
    """Return the types that the first argument of a method may have."""
    try:
        hints = get_type_hints(method)
    except Exception:
        # An annotation that cannot be resolved is ignored.
        return []
    hint = next((hint for name, hint in hints.items() if name != "return"), None)
    return [one for one in get_args(hint) or (hint,) if isinstance(one, type)]


def _read_annotations(cls: type) -> frozenset[str]:
    return frozenset(name for base in cls.__mro__ for name in inspect.get_annotations(base))


# Properties of the engine and its model.


_UNREAD: dict[str, set[ConstraintFormat]] = {
    "none": set(CONSTRAINTS),
    "outlines": {"gbnf", "lark", "structural_tag"},
    # Our llguidance, as for the embedded engine, reads all of them; the engine's does not read Lark.
    "llguidance": set(CONSTRAINTS) - {"lark"},
}
"""Constraint formats that a grammar backend does not read; all others read everything but Lark."""


def manager_of(engine: Any) -> Any:
    """Return the object that takes requests: the engine, or its tokenizer manager."""
    for candidate in _parts(engine):
        if callable(getattr(candidate, "generate_request", None)):
            return candidate
    raise SettingsError(f"{type(engine).__name__} has no generate_request; it cannot be served as an engine.")


def name_of(engine: Any) -> str:
    return str(_first(engine, "served_model_name", "server_args.served_model_name", "model_path") or "model")


def length_of(engine: Any, tokenizer: Tokenizer | None) -> int | None:
    """Return the engine's context length; None if only the engine knows it."""
    outcome = _first(engine, "context_len", "model_config.context_len", "max_model_len")
    result = outcome or getattr(tokenizer, "longest", None)
    return None if result is None else int(result)


def tokenizer_of(engine: Any, result: Any) -> Tokenizer | None:
    """Return the given tokenizer, else the engine's own, if any; one of Hugging Face is wrapped."""
    tokenizer = result if result is not None else _first(engine, "tokenizer")
    if tokenizer is None and hasattr(engine, "get_tokenizer"):
        tokenizer = engine.get_tokenizer()
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, str):
        from dragoman.engines.remote.engine import tokenizer_of as tokenizer_named

        return tokenizer_named(tokenizer)
    ends, size = _first(engine, "model_config.hf_eos_token_id"), _first(engine, "model_config.vocab_size")
    return HfTokenizer(tokenizer, size=size, end_ids=ends or ())


def growth_of(engine: Any) -> OutputMode:
    """Return how the engine streams texts: SGLang has a setting for it, others are observed."""
    names = ("incremental_streaming_output", "stream_output")
    return OutputMode(pieces=True if any(_first(engine, f"server_args.{name}") for name in names) else None)


def sources_of(engine: Any, form: RequestFormat) -> tuple[ConstraintFormat, ...]:
    """Return the constraint formats that have a request field and that the engine's grammar backend reads."""
    unread = _UNREAD.get(_first(engine, "server_args.grammar_backend"), {"lark"})
    return tuple(
        form_ for form_, field in CONSTRAINTS.items() if field in form.sampling and form_ not in unread
    )


def _parts(engine: Any) -> list[Any]:
    manager = getattr(engine, "tokenizer_manager", None)
    return [engine] if manager is None else [engine, manager]


def _first(engine: Any, *paths: str) -> Any:
    """Return the first of these attributes that exists and is not None."""
    for path in paths:
        for result in _parts(engine):
            for name in path.split("."):
                result = getattr(result, name, None)
            if result is not None:
                return result
    return None


# Other operations of such engines: methods that take one request object, or nothing.


PAUSE, CONTINUE = "pause_generation", "continue_generation"
LOAD, UNLOAD = "load_lora_adapter", "unload_lora_adapter"


def _find_methods(manager: Any, *names: str) -> list[Callable[..., Any]]:
    """Return all of these methods, or none if one is missing."""
    items = [getattr(manager, name, None) for name in names]
    return [method for method in items if method is not None] if all(items) else []


async def _order(method: Callable[..., Any], **fields: Any) -> Any:
    """Call a method with a request object made from those `fields` that its class takes."""
    items = []
    if inspect.signature(method).parameters and (types := _argument_types(method)):
        takes = inspect.signature(types[0]).parameters
        items = [types[0](**{name: value for name, value in fields.items() if name in takes})]
    done = method(*items)
    return await done if inspect.isawaitable(done) else done


def _packages(manager: Any) -> frozenset[str]:
    """Return the top-level packages of its class, which may be the user's own, and of the base classes."""
    return frozenset(one.__module__.partition(".")[0] for one in type(manager).__mro__[:-1])


# The Engine around them: it sends requests, yields steps, and aborts on every early exit.


class AsyncLLMEngine:
    """`AsyncLLMEngine(llm)`: an engine with `generate_request`. Arguments left out are read from it.

    `tokenizer` is a Hugging Face tokenizer or a Tokenizer, `chat_template` the source of a template, and
    `special_tokens` are texts by names such as `bos_token`. `adapters` names the LoRA adapters that are
    loaded; `sources` are the constraint formats that the engine reads.

    Without a tokenizer prompts are sent as text. An engine that returns text without ids is supported.
    """

    def __init__(
        self,
        engine: Any,
        tokenizer: Any = None,
        chat_template: str | None = None,
        model_name: str | None = None,
        max_model_len: int | None = None,
        *,
        special_tokens: Mapping[str, str] | None = None,
        adapters: Collection[str] = (),
        sources: Collection[ConstraintFormat] | None = None,
    ) -> None:
        self._manager = manager_of(engine)
        result = tokenizer_of(engine, tokenizer)
        self._form = form_of(self._manager, has_ids=result is not None)
        self._growth = growth_of(engine)
        if adapters and "lora_path" not in self._form.has:
            raise SettingsError(
                "The requests of this engine have no lora_path; remove the argument `adapters`."
            )
        own = getattr(result, "templates", {})
        templates = own if chat_template is None else {"default": chat_template}
        self.tokenizer = result or FallbackTokenizer(special_tokens)
        forms = sources_of(engine, self._form) if sources is None else sources
        kinds = [kind for kind, name in _MEDIA.items() if name in self._form.has]
        self.card = ModelCard(
            name=model_name or name_of(engine),
            max_model_len=max_model_len or length_of(engine, result),
            templates=templates,
            special_tokens={**getattr(self.tokenizer, "special_tokens", {}), **(special_tokens or {})},
            adapters=tuple(adapters),
            # Our Lark grammars refer to special tokens by id, so they need a tokenizer.
            constraint_formats=forms if result else tuple(form for form in forms if form != "lark"),
            returns_ids=result is not None,
            has_tokenizer=result is not None,
            wants_prompt_text=self._form.takes_text,
            constrains_after_reasoning=self._form.skips_reasoning,
            unsupported=self._form.unsupported,
            modalities=frozenset(kinds if result and getattr(self._manager, "mm_processor", None) else ()),
        )
        self.weight_version: str | None = _first(engine, "server_args.weight_version")
        self._offer()

    def media_token_ids(self, media: Media) -> list[int]:
        return [placeholder_id(self.tokenizer, media.kind)]

    def _offer(self) -> None:
        """Add the optional methods that this engine supports: the server detects them by name."""
        for able, names in (
            (_find_methods(self._manager, PAUSE, CONTINUE), ("pause", "resume")),
            (_find_methods(self._manager, LOAD, UNLOAD), ("load_adapter", "unload_adapter")),
            (_embedding_class(self._manager), ("embed",)),
        ):
            for name in names if able else ():
                setattr(self, name, getattr(self, f"_{name}"))

    async def _pause(self) -> None:
        # In this mode the engine keeps no KV cache of running jobs, which other weights would invalidate.
        await _order(_find_methods(self._manager, PAUSE)[0], mode="retract")

    async def _resume(self, weight_version: str | None = None) -> None:
        if weight_version is not None:
            if flush := _find_methods(self._manager, "flush_cache"):
                await _order(flush[0])
            self.weight_version = weight_version
            if (args := getattr(self._manager, "server_args", None)) is not None:
                args.weight_version = weight_version
        await _order(_find_methods(self._manager, CONTINUE)[0])

    async def _load_adapter(self, name: str, path: str) -> None:
        done = await _order(_find_methods(self._manager, LOAD)[0], lora_name=name, lora_path=path)
        if getattr(done, "success", True) is False:
            logger.warning("The engine did not load an adapter: %s", getattr(done, "error_message", done))
            raise ModelFileError("The engine cannot load this adapter; see the server log.")

    async def _unload_adapter(self, name: str) -> None:
        await _order(_find_methods(self._manager, UNLOAD)[0], lora_name=name)

    async def _embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        return list(await asyncio.gather(*(self._embed_one(prompt) for prompt in prompts)))

    async def _embed_one(self, prompt: Sequence[int]) -> list[float]:
        result = _embedding_class(self._manager)
        assert result is not None
        try:
            async with aclosing(self._manager.generate_request(result(input_ids=list(prompt)))) as outputs:
                async for output in outputs:
                    vector = [float(number) for number in output["embedding"]]
                    length = hypot(*vector) or 1.0
                    return [number / length for number in vector]
        except Exception as error:
            if is_refused(error, begun=False):
                logger.warning("The engine refused an embedding request: %s", error)
                raise client_error(error, _packages(self._manager)) from error
            raise
        raise EngineFailed("The engine returned no embedding.")

    async def generate(self, job: Job) -> AsyncIterator[Step]:
        request = self._form.request(job)
        reader = OutputReader(job, self._growth, self._gives_text)
        try:
            async with aclosing(self._manager.generate_request(request)) as outputs:
                try:
                    async for output in outputs:
                        yield reader.step(output)
                        if reader.over:
                            return
                finally:
                    if reader.over:
                        # Let the generator finish its own cleanup after the last output.
                        await anext(outputs, None)
        except Exception as error:
            if is_refused(error, begun=reader.begun):
                logger.warning("The engine refused job %s: %s", job.id, error)
                raise client_error(error, _packages(self._manager)) from error
            raise
        finally:
            if not reader.over:
                await self._abort(request.rid)

    def _gives_text(self) -> None:
        """Handle an engine that answers in text: from now on requests that need ids of answers are
        refused.
        """
        if self.card.returns_ids:
            logger.warning(
                "The engine returns text without ids: answers have no ids, and dragoman counts their tokens"
            )
            self.card.returns_ids = False

    async def _abort(self, rid: str) -> None:
        """Abort a request after its generator was closed, which alone does not stop all engines."""
        abort = getattr(self._manager, "abort_request", None)
        if abort is None:
            return
        try:
            done = abort(rid)
            if inspect.isawaitable(done):
                await done
        except Exception:
            logger.exception("The engine failed to abort request %s", rid)
