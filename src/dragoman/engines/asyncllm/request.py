"""What an AsyncLLM-shaped engine is asked: by its own request class where it shows one, else by one like it.

The engine's package is not imported. Its class is found by `engine.request_class`, or by the annotation of
`generate_request`; which names its sampling parameters have, by the `SamplingParams` beside that class.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from msgspec import Struct

from dragoman.engines.protocol import UNSUPPORTABLE
from dragoman.types import LARK_LINE, ConstraintSource, Job, SourceForm


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
            value = _spelled(ours, getattr(job.sampling, ours))
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


def _spelled(name: str, value: Any) -> Any:
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
        takes | _annotated(own),
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
        (one for one in candidates if {"input_ids", "sampling_params", "stream"} <= _annotated(one)), None
    )


def _annotated(cls: type) -> frozenset[str]:
    return frozenset(name for base in cls.__mro__ for name in inspect.get_annotations(base))
