"""What a client asked, whatever API it came through."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from dragoman.engines.model_files import sensible
from dragoman.engines.protocol import ModelCard
from dragoman.errors import ADAPTERS, ALTERNATIVES, ANSWERS, STOP, BadRequest, Part, SettingsError
from dragoman.limits import Limits, check_count
from dragoman.types import Adapters, Prompt, Sampling


class Reading(Struct, frozen=True, kw_only=True):
    """What is to be found in an answer, in the model's dialect."""

    tools: tuple[dict[str, Any], ...] = ()
    """Values of a call get their types from these."""
    calls: bool = True
    """If not, a call is text."""
    reasoning: bool = True
    """If not, reasoning is text."""
    most_calls: int | None = None
    """The answer ends where a further call begins."""
    verbatim: bool = False
    """Text, once it has begun, is all that comes: markers in it are quotations."""
    custom: frozenset[str] = frozenset()
    """Tools that take a text: the arguments of their calls are the text itself."""
    places: tuple[str, ...] = ()
    """Where the schema of each of the tools is, for messages: `tools[2].function.parameters`."""


Syntax: TypeAlias = Literal["json_object", "json_schema", "regex", "choice", "gbnf", "lark"]


class Wanted(Struct, frozen=True, kw_only=True):
    """What the text of an answer must be."""

    syntax: Syntax
    value: Any = None
    """The schema, the pattern, the choices or the grammar."""
    param: str
    """The field that it came in."""


class Calling(Struct, frozen=True, kw_only=True):
    """What is asked about calls beyond what the model does by itself."""

    required: bool = False
    """The answer must have a call."""
    names: tuple[str, ...] | None = None
    """Only these tools may be called; None: any of them."""
    named: bool = False
    """The client has named the one tool to call, and gets one call of it."""
    param: str = "tool_choice"
    """The field that asks for it; `tools[2].function.strict` for a tool that is strict."""


class Thinking(Struct, frozen=True, kw_only=True):
    """How many tokens reasoning may have before it is ended."""

    tokens: int
    param: str
    """The field that it came in."""
    soft: bool = False
    """An engine that cannot end reasoning is asked all the same: the template has been told."""


class AdapterWish(Struct, frozen=True):
    """A LoRA adapter that is asked for."""

    adapter: str | int
    """Its name, or its number among the engine's."""
    scale: float
    place: str
    """Where it was asked for, for messages: `lora[1]`."""


class TurnSpec(Struct, frozen=True, kw_only=True):
    model: str | None
    adapters: tuple[AdapterWish, ...] | None = None
    """None: those that the model's name stands for."""
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    """`max_tokens` 0 means as many as is usual; `bad_words` and DRY's breakers come as text, below."""
    chosen: frozenset[str] = frozenset()
    """Fields of the sampling that the client has set; the others are the model's or the operator's."""
    reading: Reading | None = None
    """None: the answer is text and nothing else."""
    wanted: Wanted | None = None
    calling: Calling | None = None
    thinking: Thinking | None = None
    n: int = 1
    """Continuations to compute for each prompt."""
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    bad_words: tuple[str, ...] = ()
    dry_breakers: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    truncate_prompt: int | None = None
    """Keep this many of the prompt's last ids; -1 means as many as the model takes."""
    priority: int = 0
    cache_salt: str = ""
    reuse_prefix: bool = True
    token_ids: bool = False
    """The client wants the ids that were sampled."""
    owner: str = ""
    """Whose key it is, as a hash; empty where keys are off."""

    @property
    def salt(self) -> str:
        """Prompts share what is kept of them only where this is the same: the key and the client's own word.

        Otherwise the time that an answer takes would tell one client what another has asked.
        """
        if not self.owner:
            return self.cache_salt
        # Hashed again: it goes as far as other servers, and the hash of a key is nothing for them.
        return blake2b(f"{self.owner}\0{self.cache_salt}".encode(), digest_size=16).hexdigest()

    @property
    def constrained(self) -> bool:
        """Whether a grammar may be made for it."""
        single = self.reading is not None and self.reading.calls and self.reading.most_calls is not None
        return self.wanted is not None or self.calling is not None or single

    @property
    def bounded(self) -> bool:
        """Whether anything at all is asked of what the answer may be, or how long it may think."""
        return self.constrained or self.thinking is not None


# What holds where a request says nothing of how to sample: the operator's word, then the model's.


LEAST, MOST = 2048, 16384
"""Between these is the length of an answer without a limit: a quarter of the context, if that is between."""


class Defaults(Struct, frozen=True):
    sampling: Mapping[str, float]
    max_tokens: int

    def applied(self, spec: TurnSpec) -> Sampling:
        """The sampling of a turn, with what its client left open."""
        open_ = {name: value for name, value in self.sampling.items() if name not in spec.chosen}
        sampling = replace(spec.sampling, **open_) if open_ else spec.sampling
        if sampling.max_tokens:
            return sampling
        return replace(sampling, max_tokens=max(self.max_tokens, sampling.min_tokens))


def defaults_of(card: ModelCard, operator: Mapping[str, Any], *, exact: bool = False) -> Defaults:
    """`exact`: the model's own distribution, whatever its makers recommend, because somebody trains on it."""
    told = dict(operator)
    usual = max(LEAST, min(card.max_model_len // 4, MOST))
    most = told.pop("max_tokens", usual)
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise SettingsError("`sampling`: max_tokens must be a number of tokens.", param="sampling")
    known = sensible(told)
    if wrong := sorted(told.keys() - known.keys()):
        message = f"`sampling`: {wrong[0]} is no field of the sampling, or its value is not one for it."
        raise SettingsError(message, param="sampling")
    # What a card says may come from anywhere: over a wire, a whole number is one with a point.
    sampling = known if exact else {**sensible(card.sampling), **known}
    # An engine that cannot do it is not asked for it by a default.
    return Defaults({name: sampling[name] for name in sampling if name not in card.refused}, most)


class Breakers:
    """The ids in which one of some texts stands: where DRY lets a repetition end.

    Looks through the vocabulary as one text, which is quicker than to look at each of its pieces.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._vocabulary: tuple[bytes, np.ndarray[tuple[int], np.dtype[np.intp]]] | None = None
        self.ids = lru_cache(maxsize=64)(self._ids)

    def _ids(self, texts: tuple[str, ...]) -> frozenset[int]:
        if self._vocabulary is None:
            ends = np.fromiter(accumulate(map(len, self._pieces)), np.intp, len(self._pieces))
            self._vocabulary = b"".join(self._pieces), ends
        joined, ends = self._vocabulary
        found: set[int] = set()
        for text in {text.encode() for text in texts}:
            starts = np.fromiter((match.start() for match in re.finditer(re.escape(text), joined)), np.intp)
            first = ends.searchsorted(starts, side="right")
            # What goes beyond the end of its piece is in no id.
            found.update(first[starts + len(text) <= ends[first]].tolist())
        return frozenset(found)


# What a turn may ask for, at all and of this engine; the rest is refused here, before anything is done.


_UNASKED = Sampling(max_tokens=0)


def check_turn(spec: TurnSpec, limits: Limits) -> None:
    """How long a prompt may be, the prompter says when it gets one."""
    check_count(len(spec.prompts) * spec.n, limits.choices, ANSWERS, "answers to all prompts")
    _check_stops(spec, limits)
    _check_logprobs(spec, limits)
    asked = spec.sampling
    check_count(len(asked.logit_bias), limits.logit_bias, Part("logit_bias"), "entries")
    check_count(len(spec.bad_words), limits.bad_words, Part("bad_words"), "entries")
    check_count(len(asked.allowed_token_ids or ()), limits.token_ids, Part("allowed_token_ids"), "ids")


def _check_stops(spec: TurnSpec, limits: Limits) -> None:
    count = len(spec.stop) + len(spec.sampling.stop_token_ids)
    check_count(count, limits.stops, STOP, "stop strings and ids")
    for stop in spec.stop:
        check_count(len(stop), limits.stop_chars, STOP, "characters in a stop string")


def check_told_prompts(spec: TurnSpec, lengths: Sequence[int], limits: Limits) -> None:
    """What is told of prompts of so many ids, once for each answer."""
    if spec.sampling.prompt_logprobs is not None:
        count = sum(lengths) * spec.n * (1 + spec.sampling.prompt_logprobs)
        check_count(count, limits.told_logprobs, Part("prompt_logprobs"), "log probabilities of prompts")


def tokens_told(spec: TurnSpec, tokens: int, limits: Limits) -> int:
    """How many of so many tokens an answer may have, if alternatives are told beside each of them.

    Who has said how many it wants is refused rather than given less.
    """
    if not spec.sampling.logprobs:
        return tokens
    answers, each = len(spec.prompts) * spec.n, 1 + spec.sampling.logprobs
    most = max(limits.told_logprobs // (answers * each), 1)
    if tokens > most and spec.sampling.max_tokens:
        message = (
            f"{tokens} tokens with {each} log probabilities each, for {answers} answers, are more than the "
            f"{limits.told_logprobs} that are allowed: ask for {most} tokens, or for fewer alternatives."
        )
        raise BadRequest(message, param=ALTERNATIVES, code="limit_exceeded")
    return min(tokens, most)


def _check_logprobs(spec: TurnSpec, limits: Limits) -> None:
    check_count(spec.sampling.logprobs or 0, limits.logprobs, ALTERNATIVES, "alternatives")
    check_count(spec.sampling.prompt_logprobs or 0, limits.logprobs, Part("prompt_logprobs"), "alternatives")


def refuse_unsupported(spec: TurnSpec, card: ModelCard) -> None:
    if spec.sampling.samplers is not None and not card.has_samplers:
        message = (
            "The engine behind this model has the usual samplers only (temperature, top_p, top_k, min_p and"
            " penalties), in their usual order; leave the others out."
        )
        raise BadRequest(message, param=Part("samplers"), code="unsupported_field")
    for name in card.refused:
        if _is_asked(spec, name):
            message = f"The engine behind this model does not support '{name}'; leave it out."
            raise BadRequest(message, param=Part(name), code="unsupported_field")


def _is_asked(spec: TurnSpec, name: str) -> bool:
    match name:
        case "bad_words":
            return bool(spec.bad_words)
        case "priority":
            return spec.priority != 0
        case "cache_salt":
            return spec.cache_salt != ""
        case "reuse_prefix":
            return not spec.reuse_prefix
        case "return_token_ids":
            return spec.token_ids
    return bool(getattr(spec.sampling, name) != getattr(_UNASKED, name))


def choose_adapters(card: ModelCard, named: str | None, wishes: Sequence[AdapterWish] | None) -> Adapters:
    """`named` is the adapter that the model's name stands for; what has a scale of 0 is not there."""
    if wishes is None:
        return ((named, 1.0),) if named is not None else ()
    if named is not None:
        message = f"'{named}' is an adapter already; leave out '{ADAPTERS}', or send the model's own name."
        raise BadRequest(message, param=ADAPTERS, code="invalid_value")
    scales: dict[str, float] = {}
    for wish in wishes:
        name = _resolve_adapter(card, wish)
        if name in scales:
            message = f"The adapter '{name}' is there a second time; name it once."
            raise BadRequest(message, param=wish.place, code="invalid_value")
        scales[name] = wish.scale
    chosen = {name: scale for name, scale in scales.items() if scale}
    if not card.mixes_adapters:
        _check_single(chosen, wishes)
    return tuple(sorted(chosen.items()))


def _resolve_adapter(card: ModelCard, wish: AdapterWish) -> str:
    if isinstance(wish.adapter, int):
        if wish.adapter < len(card.adapters):
            return card.adapters[wish.adapter]
    elif wish.adapter in card.adapters:
        return wish.adapter
    known = ", ".join(f"{name} ({number})" for number, name in enumerate(card.adapters)) or "none"
    message = f"There is no adapter {wish.adapter!r}; there are: {known}."
    raise BadRequest(message, param=wish.place, code="invalid_value")


def _check_single(chosen: dict[str, float], wishes: Sequence[AdapterWish]) -> None:
    if len(chosen) > 1:
        message = "The engine behind this model uses one adapter at a time; name one."
        raise BadRequest(message, param=ADAPTERS, code="unsupported_field")
    for wish in wishes:
        if wish.scale not in (0.0, 1.0):
            message = "The engine behind this model has no scales of adapters; leave out the scale."
            raise BadRequest(message, param=f"{wish.place}.scale", code="unsupported_field")
