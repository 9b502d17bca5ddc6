"""The request fields that all APIs share, and their conversion to a turn.

Every field may be null, which means unset: some clients send null for all unused fields.
"""

from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct, convert
from msgspec.json import encode
from msgspec.msgpack import encode as pack
from msgspec.structs import replace

from dragoman.api.request_decoder import IgnoredFields, RequestDecoder
from dragoman.api.sampling_fields import (
    SamplerFields,
    check_samplers,
    given_samplers,
    middle_temperature,
    read_wanted,
    samplers,
)
from dragoman.errors import BadRequest, SettingsError
from dragoman.limits import Limits
from dragoman.prompt.template import check_kwargs
from dragoman.settings import PresetSettings, Settings
from dragoman.turns.spec import (
    AdapterRequest,
    History,
    ParseOptions,
    Preset,
    PresetPair,
    ReasoningTokenLimit,
    ToolCallPolicy,
    TurnSpec,
)
from dragoman.types import Prompt, ReasoningRestore, Sampling

Scale: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]


class LoraEntry(Struct, forbid_unknown_fields=True):
    exact: ClassVar[bool] = True
    name: Annotated[str, Meta(max_length=512)] | None = None
    id: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    scale: Scale | None = None


Lora: TypeAlias = Annotated[str, Meta(max_length=512)] | Annotated[list[LoraEntry], Meta(max_length=64)]


def adapter_requests(lora: Lora | None) -> tuple[AdapterRequest, ...] | None:
    """Return the adapters of a request, or None if the model's name decides."""
    if lora is None:
        return None
    if isinstance(lora, str):
        return (AdapterRequest(lora, 1.0, "lora"),)
    return tuple(_wish(entry, f"lora[{number}]") for number, entry in enumerate(lora))


def _wish(entry: LoraEntry, param: str) -> AdapterRequest:
    scale = 1.0 if entry.scale is None else entry.scale
    if entry.name is not None and entry.id is None:
        return AdapterRequest(entry.name, scale, param)
    if entry.id is not None and entry.name is None:
        return AdapterRequest(entry.id, scale, param)
    raise BadRequest(f"'{param}' must have a name or an id.", param=param, code="invalid_value")


Fraction: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Natural: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Longest: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""A limit of tokens for an answer; -1 means as many as fit."""
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=24 * 60 * 60)]
ShortText: TypeAlias = Annotated[str, Meta(max_length=1024)]
# fmt: off
_PLAIN = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "stop_token_ids", "min_tokens", "ignore_eos", "seed",
)
# fmt: on
"""Fields with the same name and meaning in `Sampling`."""
_LISTS = ("stop", "bad_words")
_DECIDED = ("temperature", "typical_p", "dry_breakers", *_PLAIN, *_LISTS)
_plain_values = attrgetter(*_PLAIN, *_LISTS)


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SharedFields(SamplerFields, kw_only=True):
    model: Annotated[str, Meta(max_length=512)] | None = None
    lora: Lora | None = None
    n: Positive | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Fraction | None = None
    typical_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    bad_words: list[ShortText] | None = None
    allowed_token_ids: list[TokenId] | None = None
    max_tokens: Longest | None = None
    min_tokens: Natural | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Natural | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    timeout: Seconds | None = None
    cache_salt: ShortText | None = None
    cache_prompt: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.stop
        return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)

    @property
    def keeps_stop(self) -> bool:
        return bool(self.include_stop_str_in_output or self.no_stop_trim)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def check_shared(fields: SharedFields, ignored: IgnoredFields | None = None) -> None:
    """Check rules across fields; types and ranges were checked while decoding, and the turn checks counts."""
    read_wanted(fields)
    check_samplers(fields)
    if "" in fields.stops:
        raise BadRequest("A stop string must not be empty.", param="stop", code="invalid_value")
    if fields.allowed_token_ids is not None and not fields.allowed_token_ids:
        raise BadRequest(
            "allowed_token_ids must not be empty.", param="allowed_token_ids", code="invalid_value"
        )
    if fields.truncate_prompt_tokens == 0:
        message = "truncate_prompt_tokens must be at least 1, or -1 for as many as fit."
        raise BadRequest(message, param="truncate_prompt_tokens", code="invalid_value")
    if fields.stream_options and not fields.stream and ignored is not None:
        ignored.add("stream_options")
    if fields.stream and fields.prompt_logprobs is not None:
        message = "prompt_logprobs cannot be streamed; leave out prompt_logprobs or stream."
        raise BadRequest(message, param="prompt_logprobs", code="invalid_value")


def sampling(fields: SharedFields, *, max_tokens: int | None, logprobs: int | None) -> Sampling:
    """Return the sampling parameters. Texts are not token ids yet; `max_tokens` 0 means the default."""
    min_tokens = fields.min_tokens or 0
    if max_tokens == -1:
        max_tokens = 2**31 - 1
    if max_tokens is not None and min_tokens > max_tokens:
        message = f"min_tokens ({min_tokens}) must not be greater than the limit of {max_tokens} tokens."
        raise BadRequest(message, param="min_tokens", code="invalid_value")
    return Sampling(
        max_tokens=max_tokens or 0,
        temperature=_or(_temperature(fields), 1.0),
        top_p=_or(fields.top_p, 1.0),
        top_k=max(fields.top_k or 0, 0),
        min_p=fields.min_p or 0.0,
        typical_p=_or(_typical_p(fields), 1.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        logit_bias=_bias(fields.logit_bias or {}),
        allowed_token_ids=tuple(fields.allowed_token_ids) if fields.allowed_token_ids else None,
        stop_token_ids=frozenset(fields.stop_token_ids or ()),
        min_tokens=min_tokens,
        ignore_eos=bool(fields.ignore_eos),
        # To llama.cpp, vLLM and most clients, -1 means a random seed.
        seed=None if fields.seed == -1 else fields.seed,
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        samplers=samplers(fields, penalises=_penalises(fields)),
    )


def _penalises(fields: SharedFields) -> bool:
    return bool(
        fields.presence_penalty or fields.frequency_penalty or fields.repetition_penalty not in (None, 1.0)
    )


def check_longest(number: int | None, param: str) -> None:
    if number == 0:
        message = f"{param} must be at least 1, or -1 for as many as fit."
        raise BadRequest(message, param=param, code="invalid_value")


def list_chosen(fields: SharedFields) -> frozenset[str]:
    """Return the sampling fields that the client set, which defaults must not override."""
    values = _temperature(fields), _typical_p(fields), fields.dry_sequence_breakers, *_plain_values(fields)
    texts = [name for name, value in zip(_DECIDED, values, strict=True) if value is not None]
    return frozenset((*texts, *given_samplers(fields)))


def _temperature(fields: SharedFields) -> float | None:
    between = middle_temperature(fields)
    return fields.temperature if between is None else between


def _typical_p(fields: SharedFields) -> float | None:
    return fields.typical if fields.typical_p is None else fields.typical_p


def turn_spec(
    fields: SharedFields,
    prompts: tuple[Prompt, ...],
    asked: Sampling,
    n: int,
    reading: ParseOptions | None = None,
    calling: ToolCallPolicy | None = None,
    thinking: ReasoningTokenLimit | None = None,
) -> TurnSpec:
    """Build the turn from the fields of a request, independent of the API."""
    return TurnSpec(
        model=fields.model,
        adapters=adapter_requests(fields.lora),
        prompts=prompts,
        sampling=asked,
        chosen=list_chosen(fields),
        dry_breakers=tuple(fields.dry_sequence_breakers or ()),
        parsing=reading,
        output_constraint=read_wanted(fields),
        tool_policy=calling,
        reasoning_limit=thinking,
        history=fields.history if isinstance(fields, TemplateFields) else None,
        restore_reasoning=fields.restore_reasoning if isinstance(fields, TemplateFields) else None,
        n=n,
        stop=fields.stops,
        keep_stop=fields.keeps_stop,
        bad_words=tuple(fields.bad_words or ()),
        skip_special_tokens=fields.skip_special_tokens is not False,
        truncate_prompt=fields.truncate_prompt_tokens,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        reuse_prefix=fields.cache_prompt is not False,
        token_ids=bool(fields.return_token_ids),
        hints=(fields.prompt_cache_key or "",),
    )


MOST_TERMS = 64
LONGEST_TERMS = 1024
"""Maximum size of a cache key in bytes. Requests with tools and schemas are longer, and are not cached."""


class TurnSpecCache:
    """Cache of turns, keyed by all request fields but `said`; most requests repeat the other fields."""

    def __init__(self, kind: type[SharedFields], text: str) -> None:
        self._values = attrgetter(*(name for name in kind.__struct_fields__ if name != text))
        self._kept: dict[bytes, TurnSpec] = {}

    def key(self, fields: SharedFields) -> bytes:
        """Return the key, or empty bytes if a field has half of a surrogate pair and cannot be encoded."""
        try:
            return pack(self._values(fields))
        except ValueError:
            return b""

    def get(self, key: bytes) -> TurnSpec | None:
        return self._kept.get(key)

    def keep(self, key: bytes, spec: TurnSpec) -> None:
        if 0 < len(key) <= LONGEST_TERMS:
            if len(self._kept) >= MOST_TERMS:
                self._kept.clear()
            self._kept[key] = replace(spec, prompts=())


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _bias(entries: dict[str, float]) -> dict[int, float]:
    try:
        return {int(key): value for key, value in entries.items() if _is_id(key)}
    except ValueError:
        message = "The keys of logit_bias must be token ids."
        raise BadRequest(message, param="logit_bias", code="invalid_value") from None


def _is_id(key: str) -> bool:
    # int() accepts "1_0", " 1" and digits of other scripts, which are not token ids.
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise ValueError(key)
    return True


# Fields about reasoning, and variables of the chat template.


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity: TypeAlias = Literal["low", "medium", "high"]
Budget: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]

BUDGETS = ("thinking_token_budget", "reasoning_budget_tokens", "reasoning_budget", "thinking_budget")


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Budget | None = None
    exclude: bool | None = None
    echoed: ClassVar[frozenset[str]] = frozenset({"summary", "generate_summary", "context", "mode"})


class ReasoningFields(SharedFields, kw_only=True):
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: Budget | None = None
    reasoning_budget_tokens: Budget | None = None
    reasoning_budget: Budget | None = None
    thinking_budget: Budget | None = None

    @property
    def effort(self) -> Effort | None:
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)

    @property
    def thinks(self) -> bool | None:
        """Whether to reason; None if the request does not say."""
        outcome = self.enable_thinking
        if outcome is None and self.reasoning:
            outcome = self.reasoning.enabled
        return False if outcome is None and self.effort == "none" else outcome


def check_reasoning(fields: ReasoningFields) -> None:
    inner = fields.reasoning or ReasoningOptions()
    both = {
        "reasoning.effort": (inner.effort, fields.reasoning_effort),
        "reasoning.enabled": (inner.enabled, fields.enable_thinking),
    }
    for param, (one, other) in both.items():
        if None not in (one, other) and one != other:
            message = f"'{param}' and its other name have different values; send one of them."
            raise BadRequest(message, param=param, code="invalid_value")
    budgets = _budgets(fields)
    if len(budgets) > 1:
        message = f"'{budgets[1][0]}' and '{budgets[0][0]}' are the same field; send one of them."
        raise BadRequest(message, param=budgets[1][0], code="invalid_value")


def thinking(fields: ReasoningFields) -> ReasoningTokenLimit | None:
    """Return the limit of reasoning tokens; effort `none` is a soft limit of 0, for engines that can end
    reasoning."""
    for param, tokens in _budgets(fields):
        return ReasoningTokenLimit(tokens=tokens, param=param) if tokens >= 0 else None
    return (
        ReasoningTokenLimit(tokens=0, param="reasoning_effort", soft=True)
        if fields.effort == "none"
        else None
    )


def _budgets(fields: ReasoningFields) -> list[tuple[str, int]]:
    items = [(name, getattr(fields, name)) for name in BUDGETS]
    if fields.reasoning:
        items.append(("reasoning.max_tokens", fields.reasoning.max_tokens))
    return [(name, tokens) for name, tokens in items if tokens is not None]


def thought_text(result: Any) -> str:
    """Return the text of reasoning such as `{"type": "thinking", "thinking": "Hm."}`, under any of its field
    names."""
    if isinstance(result, str):
        return result
    if isinstance(result, list):
        return "".join(thought_text(part) for part in result)
    if not isinstance(result, dict):
        return ""
    names = ("thinking", "reasoning", "text", "content", "summary")
    return next((text for name in names if (text := thought_text(result.get(name)))), "")


class TemplateFields(ReasoningFields, kw_only=True):
    history: History | None = None
    restore_reasoning: ReasoningRestore | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    template_vars: dict[str, Any] | None = None


def check_template(fields: TemplateFields, limits: Limits) -> None:
    """Check template variables even if nothing is rendered: all routes reject the same requests."""
    for mapping in (fields.chat_template_kwargs, fields.template_vars):
        check_kwargs(mapping or {}, limits.template_kwargs_chars)


def template_kwargs(fields: TemplateFields, verbosity: Verbosity | None) -> dict[str, Any]:
    """Return the template variables; those that the client names directly override other fields."""
    named = {"enable_thinking": fields.thinks, "reasoning_effort": fields.effort, "verbosity": verbosity}
    mapping = {name: value for name, value in named.items() if value is not None}
    return {**mapping, **(fields.template_vars or {}), **(fields.chat_template_kwargs or {})}


# The operator's presets, in the format of a request.


_FOR_ALL = frozenset(
    {"temperature", "typical_p", "max_tokens", *_LISTS, *_PLAIN, *SamplerFields.__annotations__}
    | {"enable_thinking", "reasoning_effort", *TemplateFields.__annotations__}
)


class PresetFields(TemplateFields, kw_only=True, forbid_unknown_fields=True):
    pass


_PRESETS = RequestDecoder.for_type(PresetFields)


def read_presets(settings: Settings) -> tuple[PresetPair, dict[str, PresetPair]]:
    """Return the presets for all requests, and those for requests to a named model."""
    named = {
        name: PresetPair(
            _preset(each.sampling, f"presets.{name}.sampling", settings.limits),
            _preset(each.override, f"presets.{name}.override", settings.limits),
        )
        for name, each in convert(settings.presets, dict[str, PresetSettings]).items()
    }
    open_ = _preset(settings.sampling, "sampling", settings.limits)
    open_ = open_.over(Preset(history=settings.history, restore_reasoning=settings.restore_reasoning))
    return PresetPair(open_, _preset(settings.override, "override", settings.limits)), named


def _preset(result: dict[str, Any], name: str, limits: Limits) -> Preset:
    try:
        fields: PresetFields = _PRESETS.read(encode(result))
        for each in fields.__struct_fields__:
            if getattr(fields, each) is not None and each not in _FOR_ALL:
                raise BadRequest(f"'{each}' cannot be preset; clients set it in each request.")
        check_shared(fields)
        check_longest(fields.max_tokens, "max_tokens")
        check_reasoning(fields)
        check_template(fields, limits)
        asked = sampling(fields, max_tokens=fields.max_tokens, logprobs=None)
    except BadRequest as error:
        raise SettingsError(f"`{name}`: {error.message}", param=name) from None
    mapping, chosen = given_samplers(fields), list_chosen(fields)
    lists = {
        "stop": fields.stops,
        "bad_words": fields.bad_words,
        "dry_breakers": fields.dry_sequence_breakers,
    }
    return Preset(
        sampling={each: getattr(asked, each) for each in chosen - mapping.keys() - lists.keys()},
        samplers=mapping,
        lists={each: tuple(texts or ()) for each, texts in lists.items() if each in chosen},
        max_tokens=asked.max_tokens or None,
        template_kwargs=template_kwargs(fields, None),
        history=fields.history,
        restore_reasoning=fields.restore_reasoning,
    )
