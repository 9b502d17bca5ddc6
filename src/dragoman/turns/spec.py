"""Specification of a turn, for all APIs: request fields, the operator's defaults, checks of both, and whether
the prompt has opened reasoning.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from dragoman.dialects.declarations import Dialect, starts_in_reasoning
from dragoman.engines.model_files import sensible
from dragoman.engines.protocol import OF_IDS, ModelCard, Tokenizer, require_tokenizer
from dragoman.errors import CHOICE_COUNT, STOP, TOP_LOGPROBS, BadRequest, ParamKey, SettingsError
from dragoman.limits import Limits, check_count
from dragoman.settings import Settings
from dragoman.types import UNBOUNDED, Conversation, ExtraSamplers, Prompt, ReasoningRestore, Sampling

# Requests.


History: TypeAlias = Literal["template", "sampled"]
"""How prompts contain earlier answers: as the template renders them now, or as they were sampled."""


class ParseOptions(Struct, frozen=True, kw_only=True):
    """What to parse from an answer in the model's dialect."""

    tools: tuple[dict[str, Any], ...] = ()
    """The tools, whose schemas give call arguments their types."""
    calls: bool = True
    """Whether to parse calls; if not, they stay in the text."""
    reasoning: bool = True
    """Whether to parse reasoning; if not, it stays in the text."""
    most_calls: int | None = None
    """The answer ends where one call more begins."""
    verbatim: bool = False
    """Everything after the beginning of the text is text: markers in it are quotations."""
    custom: frozenset[str] = frozenset()
    """Custom tools: the arguments of their calls are plain text."""
    logprobs: Literal["all", "text"] = "all"
    """Whether to report log probabilities of all tokens or only of those of the text."""
    params: tuple[str, ...] = ()
    """The path of each tool's schema, for messages: `tools[2].function.parameters`."""


Syntax: TypeAlias = Literal["json_object", "json_schema", "regex", "choice", "gbnf", "lark", "structural_tag"]


class OutputConstraint(Struct, frozen=True, kw_only=True):
    """The format that an answer's text must have."""

    syntax: Syntax
    value: Any = None
    """The schema, pattern, choices or grammar."""
    param: str


class ToolCallPolicy(Struct, frozen=True, kw_only=True):
    """Which tool calls are required or allowed."""

    required: bool = False
    """Whether the answer must have a call."""
    names: tuple[str, ...] | None = None
    """The tools that may be called; None: all."""
    named: bool = False
    """The client has named the one tool to call, and gets exactly one call."""
    param: str = "tool_choice"
    """The field that asks for it; `tools[2].function.strict` for a tool that is strict."""


class ReasoningTokenLimit(Struct, frozen=True, kw_only=True):
    """The maximum of reasoning tokens before reasoning is closed."""

    tokens: int
    param: str
    soft: bool = False
    """Accepted by engines that cannot close reasoning, because the template is told as well."""


class AdapterRequest(Struct, frozen=True):
    """A LoRA adapter named in the request."""

    adapter: str | int
    """Its name, or its number in the engine."""
    scale: float
    param: str
    """The request field, for messages: `lora[1]`."""


class TurnSpec(Struct, frozen=True, kw_only=True):
    model: str | None
    adapters: tuple[AdapterRequest, ...] | None = None
    """None: those that the model name stands for."""
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    """A `max_tokens` of 0 means the default; `bad_words` and DRY breakers are texts, in the fields below."""
    chosen: frozenset[str] = frozenset()
    """Fields of sampling and samplers that the client has set; presets may set the others."""
    parsing: ParseOptions | None = None
    """None: the answer is text only."""
    output_constraint: OutputConstraint | None = None
    tool_policy: ToolCallPolicy | None = None
    reasoning_limit: ReasoningTokenLimit | None = None
    restore_reasoning: ReasoningRestore | None = None
    """None: the operator's default."""
    between_thoughts: str = ""
    """The separator of this API between pieces of reasoning in one answer."""
    n: int = 1
    """Continuations per prompt."""
    remaining_tokens: int | None = None
    """Tokens left of an answer with several turns, whatever its other limits."""
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    bad_words: tuple[str, ...] = ()
    dry_breakers: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    history: History | None = None
    """None: the operator's default."""
    truncate_prompt: int | None = None
    """Keep this many of the prompt's last ids; -1 means as many as the model takes."""
    priority: int = 0
    cache_salt: str = ""
    reuse_prefix: bool = True
    token_ids: bool = False
    """Whether the client wants the sampled ids."""
    owner: str = ""
    """The hashed API key; empty where keys are off."""
    hints: tuple[str, ...] = ()
    """Routing hints of the client, after planning preceded by the id of the answer."""

    @property
    def salt(self) -> str:
        """The salt of the prefix cache, from key and `cache_salt`: prefixes are shared only if it is equal.

        Otherwise response times would tell one client what another has sent.
        """
        if not self.owner:
            return self.cache_salt
        # Hashed again, because other servers receive it and must not learn the hash of a key.
        return blake2b(f"{self.owner}\0{self.cache_salt}".encode(), digest_size=16).hexdigest()

    @property
    def keeps_reasoning(self) -> bool:
        """Whether reasoning is remembered and put back."""
        return self.parsing is not None and self.parsing.reasoning and self.restore_reasoning != "off"

    @property
    def constrained(self) -> bool:
        """Whether the answer may need a grammar."""
        single = self.parsing is not None and self.parsing.calls and self.parsing.most_calls is not None
        return self.output_constraint is not None or self.tool_policy is not None or single

    @property
    def bounded(self) -> bool:
        """Whether format, calls or length of reasoning are restricted."""
        return self.constrained or self.reasoning_limit is not None


# Presets for all requests. The request overrides the operator's `sampling`, which overrides the model's
# generation config. The operator's `override` applies whatever the request says.


BREAKERS = ("\n", ":", '"', "*")
"""Texts that end a repetition for DRY by default, as in llama.cpp."""
ADDED = frozenset({"stop", "bad_words"})
"""Lists of an operator's override that are added to those of the request."""
LEAST, MOST = 2048, 16384
"""Bounds of the default length of an answer: a quarter of the context, within these."""


class Preset(Struct, frozen=True, kw_only=True):
    """An operator's defaults or overrides for requests; empty fields are unset."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Sampling`, except those below."""
    samplers: Mapping[str, Any] = field(default_factory=dict)
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """`stop`, `bad_words` and `dry_breakers`, which are texts."""
    max_tokens: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    history: History | None = None
    restore_reasoning: ReasoningRestore | None = None

    def over(self, other: "Preset") -> "Preset":
        """Merge with another preset; this one wins."""
        return Preset(
            sampling={**other.sampling, **self.sampling},
            samplers={**other.samplers, **self.samplers},
            lists={**other.lists, **self.lists},
            max_tokens=self.max_tokens or other.max_tokens,
            template_kwargs={**other.template_kwargs, **self.template_kwargs},
            history=self.history or other.history,
            restore_reasoning=self.restore_reasoning or other.restore_reasoning,
        )


class PresetPair(Struct, frozen=True):
    defaults: Preset = Preset()
    """Applies where a request sets nothing."""
    overrides: Preset = Preset()
    """Overrides the request. Its `stop` and `bad_words` are added to those of the request."""

    def over(self, other: "PresetPair") -> "PresetPair":
        return PresetPair(self.defaults.over(other.defaults), self.overrides.over(other.overrides))


NO_PRESETS = PresetPair()


class RequestDefaults(Struct, frozen=True):
    """The presets for requests that use one name of the model."""

    presets: PresetPair
    max_tokens: int

    def apply(self, spec: TurnSpec) -> TurnSpec:
        """Apply presets and overrides to a request, except the default of `max_tokens`."""
        open_, fixed = self.presets.defaults, self.presets.overrides
        sampling = {name: value for name, value in open_.sampling.items() if name not in spec.chosen}
        sampling |= fixed.sampling
        if fixed.max_tokens:
            least = sampling.get("min_tokens", spec.sampling.min_tokens)
            sampling |= {"max_tokens": 0, "min_tokens": min(least, fixed.max_tokens)}
        if open_.samplers or fixed.samplers:
            sampling["samplers"] = self._samplers(spec)
        return replace(
            spec,
            sampling=replace(spec.sampling, **sampling) if sampling else spec.sampling,
            prompts=tuple(map(self.settle_prompt, spec.prompts)),
            history=fixed.history or spec.history or open_.history or "template",
            restore_reasoning=fixed.restore_reasoning or spec.restore_reasoning or open_.restore_reasoning,
            **self._lists(spec),
        )

    def list_overridden(self, spec: TurnSpec) -> str:
        """List the request fields that are overridden: `temperature, chat_template_kwargs.tone`."""
        fixed, asked = self.presets.overrides, spec.sampling
        both = ((fixed.sampling, asked), (fixed.samplers, asked.samplers or ExtraSamplers()))
        texts = [
            name
            for fields, own in both
            for name, value in fields.items()
            if name in spec.chosen and getattr(own, name) != value
        ]
        if fixed.max_tokens and asked.max_tokens not in (0, fixed.max_tokens):
            texts.append("max_tokens")
        for name in ("history", "restore_reasoning"):
            if getattr(fixed, name) and getattr(spec, name) not in (None, getattr(fixed, name)):
                texts.append(name)
        for name, value in fixed.template_kwargs.items():
            items = [each.template_kwargs for each in spec.prompts if isinstance(each, Conversation)]
            if any(name in each and each[name] != value for each in items):
                texts.append(f"chat_template_kwargs.{name}")
        return ", ".join(texts)

    def _lists(self, spec: TurnSpec) -> dict[str, tuple[str, ...]]:
        open_, fixed = self.presets.defaults.lists, self.presets.overrides.lists
        lists = {name: texts for name, texts in open_.items() if name not in spec.chosen}
        lists |= fixed
        for name in fixed.keys() & ADDED:
            own = getattr(spec, name) if name in spec.chosen else open_.get(name, ())
            lists[name] = tuple(dict.fromkeys((*own, *fixed[name])))
        if "dry_breakers" not in spec.chosen:
            lists.setdefault("dry_breakers", BREAKERS)
        return lists

    def settle_prompt(self, prompt: Prompt) -> Prompt:
        open_, fixed = self.presets.defaults.template_kwargs, self.presets.overrides.template_kwargs
        if not isinstance(prompt, Conversation) or not (open_ or fixed):
            return prompt
        return replace(prompt, template_kwargs={**open_, **prompt.template_kwargs, **fixed})

    def _samplers(self, spec: TurnSpec) -> ExtraSamplers | None:
        open_, fixed = self.presets.defaults.samplers, self.presets.overrides.samplers
        left = {name: value for name, value in open_.items() if name not in spec.chosen}
        samplers = replace(spec.sampling.samplers or ExtraSamplers(), **{**left, **fixed})
        return samplers if samplers.acts else None

    def limit(self, sampling: Sampling) -> Sampling:
        """Set the default `max_tokens` if the request has none."""
        if sampling.max_tokens:
            return sampling
        return replace(sampling, max_tokens=max(self.max_tokens, sampling.min_tokens))

    def value(self, name: str, asked: float | None) -> float | None:
        """Return the effective value of a sampling field, given that of the request; None: unset."""
        result = self.presets.defaults.sampling.get(name) if asked is None else asked
        number: float | None = self.presets.overrides.sampling.get(name, result)
        return number

    def max_total_tokens(self, asked: int | None) -> int | None:
        """Return the token limit of an answer with several turns, given that of the request; None: unset."""
        return self.presets.overrides.max_tokens or asked


def defaults_of(card: ModelCard, presets: PresetPair = NO_PRESETS, *, exact: bool = False) -> RequestDefaults:
    """Build the defaults of a model; `exact` ignores its recommended sampling, for training on the
    answers.
    """
    for result in (presets.defaults, presets.overrides):
        _check_possible(card, result)
    # A card's values may come over a wire, where a whole number has a decimal point. Recommended values that
    # the engine does not support are dropped.
    own = {} if exact else sensible(card.recommended_sampling)
    preset = Preset(sampling={name: value for name, value in own.items() if name not in card.refused_fields})
    usual = (
        card.context_tokens
        if card.context_tokens == UNBOUNDED
        else max(LEAST, min(card.context_tokens // 4, MOST))
    )
    most = presets.overrides.max_tokens or presets.defaults.max_tokens or usual
    return RequestDefaults(PresetPair(presets.defaults.over(preset), presets.overrides), most)


def _check_possible(card: ModelCard, preset: Preset) -> None:
    names = {*preset.sampling, *(name for name in ("bad_words",) if preset.lists.get(name))}
    if not card.has_samplers and ExtraSamplers(**preset.samplers).acts:
        names |= preset.samplers.keys()
    for name in sorted(names):
        if name in card.refused_fields or name in preset.samplers:
            message = f"`sampling` and `override`: the engine behind this model does not support {name}."
            raise SettingsError(message, param="sampling")


def defaults_by_name(
    card: ModelCard, settings: Settings, general: PresetPair, named: Mapping[str, PresetPair]
) -> dict[str, RequestDefaults]:
    """Build the defaults for all model names. An alias inherits the model's presets and overrides them."""
    if settings.trajectories and not card.returns_ids:
        message = "`trajectories` needs sampled ids, and this engine returns text; leave it out."
        raise SettingsError(message, param="trajectories")
    if settings.history == "sampled" and not card.returns_ids:
        message = "`history` = sampled needs sampled ids, and this engine returns text; leave it out."
        raise SettingsError(message, param="history")
    known = [card.name, *settings.model_alias, *card.adapters]
    unknown = [name for name in named if name not in known]
    if unknown and not settings.any_model and not settings.lora_dir:
        message = f"`presets`: there is no model {unknown[0]!r} here; available: {', '.join(known)}."
        raise SettingsError(message, param="presets")
    aliases = {*settings.model_alias, *(unknown if settings.any_model else ())}
    own = named.get(card.name, NO_PRESETS).over(general)
    pairs = {"": general, card.name: own}
    for name in (*known[1:], *unknown):
        pairs[name] = named.get(name, NO_PRESETS).over(own if name in aliases else general)
    return {name: defaults_of(card, pair, exact=settings.trajectories) for name, pair in pairs.items()}


class DryBreakerIndex:
    """The ids that contain one of some texts: ids at which DRY ends a repetition.

    Searches the vocabulary as one joined text, which is quicker than searching each piece.
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
        numbers: set[int] = set()
        for text in {text.encode() for text in texts}:
            starts = np.fromiter((match.start() for match in re.finditer(re.escape(text), joined)), np.intp)
            first = ends.searchsorted(starts, side="right")
            # A match that crosses the end of a piece is in no id.
            numbers.update(first[starts + len(text) <= ends[first]].tolist())
        return frozenset(numbers)


# Checks of a turn, before any work is done for it: its limits, and what the engine supports.


_UNASKED = Sampling(max_tokens=0)


def check_turn(spec: TurnSpec, limits: Limits) -> None:
    """Check the limits of a request; the prompter checks the length of prompts."""
    check_count(len(spec.prompts) * spec.n, limits.choices, CHOICE_COUNT, "answers to all prompts")
    _check_stops(spec, limits)
    _check_logprobs(spec, limits)
    asked = spec.sampling
    check_count(len(asked.logit_bias), limits.logit_bias, ParamKey("logit_bias"), "entries")
    check_count(len(spec.bad_words), limits.bad_words, ParamKey("bad_words"), "entries")
    check_count(len(asked.allowed_token_ids or ()), limits.token_ids, ParamKey("allowed_token_ids"), "ids")


def _check_stops(spec: TurnSpec, limits: Limits) -> None:
    count = len(spec.stop) + len(spec.sampling.stop_token_ids)
    check_count(count, limits.stops, STOP, "stop strings and ids")
    for stop in spec.stop:
        check_count(len(stop), limits.stop_chars, STOP, "characters in a stop string")


def check_told_prompts(spec: TurnSpec, lengths: Sequence[int], limits: Limits) -> None:
    """Check how many log probabilities of the prompts would be reported, once for each answer."""
    if spec.sampling.prompt_logprobs is not None:
        count = sum(lengths) * spec.n * (1 + spec.sampling.prompt_logprobs)
        check_count(count, limits.told_logprobs, ParamKey("prompt_logprobs"), "log probabilities of prompts")


def tokens_told(spec: TurnSpec, tokens: int, limits: Limits) -> int:
    """Reduce the length of an answer so that its reported log probabilities stay within the limit.

    A request that has set `max_tokens` is rejected instead.
    """
    if not spec.sampling.logprobs:
        return tokens
    answers, each = len(spec.prompts) * spec.n, 1 + spec.sampling.logprobs
    most = max(limits.told_logprobs // (answers * each), 1)
    if tokens > most and spec.sampling.max_tokens:
        message = (
            f"{tokens} tokens with {each} log probabilities each, for {answers} answers, "
            f"exceed the limit of {limits.told_logprobs}: ask for {most} tokens, or for "
            "fewer alternatives."
        )
        raise BadRequest(message, param=TOP_LOGPROBS, code="limit_exceeded")
    return min(tokens, most)


def _check_logprobs(spec: TurnSpec, limits: Limits) -> None:
    check_count(spec.sampling.logprobs or 0, limits.logprobs, TOP_LOGPROBS, "alternatives")
    check_count(
        spec.sampling.prompt_logprobs or 0, limits.logprobs, ParamKey("prompt_logprobs"), "alternatives"
    )


def refuse_unsupported(spec: TurnSpec, card: ModelCard) -> None:
    if spec.sampling.samplers is not None and not card.has_samplers:
        message = (
            "The engine behind this model supports only the common samplers "
            "(temperature, top_p, top_k, min_p and penalties) in their default order; "
            "leave the others out."
        )
        raise BadRequest(message, param=ParamKey("samplers"), code="unsupported_field")
    for name in card.refused_fields:
        if _is_asked(spec, name):
            if name in OF_IDS:
                require_tokenizer(card, f"'{name}'", ParamKey(name))
            message = f"The engine behind this model does not support '{name}'; leave it out."
            raise BadRequest(message, param=ParamKey(name), code="unsupported_field")


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
        case "history":
            return spec.history == "sampled"
        case "truncate_prompt_tokens":
            return spec.truncate_prompt is not None
    return bool(getattr(spec.sampling, name) != getattr(_UNASKED, name))


# Detects whether an answer begins in reasoning, because its prompt has opened it.


def opened_reasoning(dialect: Dialect, conversation: Conversation, prompt: str) -> bool:
    """Whether the prompt has opened reasoning, by the text that continues the answer, or the template's end.

    A prompt that ends with `<think>\\n` has opened it, one that ends with `<think>\\n\\n</think>` has not.
    Text of user messages does not count.
    """
    begun = _begun(conversation).rstrip()
    if starts_in_reasoning(dialect, begun, continues=True):
        return True
    closes = dialect.reasoning.close if dialect.reasoning else ()
    if any(close.strip() in begun for close in closes):
        return False
    return starts_in_reasoning(dialect, prompt.rstrip().removesuffix(begun))


def ids_opened_reasoning(dialect: Dialect, prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether a prompt of ids, which may end inside an answer, has opened reasoning.

    An answer begins after a control token, so text before the last one does not count. Without control tokens
    other than BOS, the ends of messages are unknown, and only the end of the prompt counts.
    """
    thinking = dialect.reasoning
    if thinking is None:
        return False
    markers = {spelling.strip() for spelling in (*thinking.open, *thinking.close)}
    frame = {id_ for text, id_ in tokenizer.special_ids.items() if text not in markers} - {tokenizer.bos_id}
    start = next((index for index in range(len(prompt), 0, -1) if prompt[index - 1] in frame), 0)
    text = b"".join(tokenizer.pieces[id_] for id_ in prompt[start:]).decode("utf-8", "replace")
    return starts_in_reasoning(dialect, text, continues=start > 0)


def _begun(conversation: Conversation) -> str:
    """Return the answer so far: a final message to continue, and the prefix."""
    content = conversation.messages[-1].content if conversation.continue_final_message else ""
    if isinstance(content, list):
        content = content[-1].get("text", "") if content else ""
    return (content or "") + conversation.response_prefix
