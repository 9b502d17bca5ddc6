"""The vocabulary: jobs given to engines, steps they return, and the events and answers made of them.

Structs rather than dataclasses: several are created per token. `EventFold`, at the end, builds every answer.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from msgspec import Struct, field

from dragoman.errors import CONVERSATION, PROMPT
from dragoman.media import Media, MediaSpan

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]
ConstraintFormat: TypeAlias = Literal["json_schema", "regex", "choice", "gbnf", "lark", "structural_tag"]
"""`choice` is a JSON list of texts, `lark` is in llguidance's syntax, `structural_tag` is xgrammar's."""
LARK_LINE = "%llguidance {}\n"
"""The first line that marks a grammar as Lark."""
ReasoningRestore: TypeAlias = Literal["off", "tools", "all"]
"""Which messages get dropped reasoning back: none, those with calls since the last user message, or all."""
UNBOUNDED = 2**31 - 1
"""`max_tokens` where no limit is set: as many tokens as the engine allows."""
Adapters: TypeAlias = tuple[tuple[str, float], ...]
"""LoRA adapters and their scales, sorted by name."""
EventKind: TypeAlias = Literal[
    "text", "reasoning", "call_open", "call_arguments", "call_close", "unseen", "finish"
]
"""`unseen` has ids without text that belong to the part before them: closing markers, layout."""

SamplerName: TypeAlias = Literal[
    "penalties",
    "dry",
    "smoothing",
    "temperature",
    "top_n_sigma",
    "top_a",
    "tfs",
    "min_p",
    "typical_p",
    "top_k",
    "top_p",
    "xtc",
]
SAMPLER_ORDER: tuple[SamplerName, ...] = get_args(SamplerName)
"""The default order of the samplers."""


class ExtraSamplers(Struct, frozen=True, kw_only=True):
    """Sampling parameters beyond the common ones. With the default values, none has any effect."""

    order: tuple[SamplerName, ...] = SAMPLER_ORDER
    """Samplers that are missing here are not applied, common ones included."""
    penalty_range: int | None = None
    """The number of newest ids that penalties consider; None: all."""
    smoothing_factor: float = 0.0
    smoothing_curve: float = 1.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_n_sigma: float = 0.0
    top_a: float = 0.0
    tfs: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: Literal[0, 1, 2] = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int | None = None
    """The number of newest ids to search; None: all of the prompt and the answer."""
    dry_breakers: frozenset[int] = frozenset()
    """Ids that end a repetition."""

    @property
    def acts(self) -> bool:
        """Whether any of them has an effect."""
        return bool(
            self.order != SAMPLER_ORDER
            or self.penalty_range
            or self.smoothing_factor
            or self.dynatemp_range
            or self.top_n_sigma
            or self.top_a
            or self.tfs < 1
            or self.xtc_probability
            or self.mirostat
            or self.dry_multiplier
        )


class Sampling(Struct, frozen=True, kw_only=True):
    """Sampling parameters. The defaults sample from the model's own distribution, unchanged."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    """How many alternatives to report for each sampled id; None reports no log probabilities."""
    prompt_logprobs: int | None = None
    samplers: ExtraSamplers | None = None
    """Only for engines whose card declares them."""

    @property
    def max_tokens_or_none(self) -> int | None:
        """`max_tokens`, or None if the engine should apply its own limit."""
        return None if self.max_tokens == UNBOUNDED else self.max_tokens


class Matcher(Protocol):
    """The state of one answer in a constraint, advanced by the ids of that answer."""

    def mask(self, row: Any) -> None:
        """Set the logits of all ids that may not follow to minus infinity, in a numpy row of float32."""

    def accept(self, id_: int) -> None:
        """Advance by a sampled id."""

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete: only an end id may follow."""


@runtime_checkable
class PrecomputableMatcher(Protocol):
    """A matcher that can compute its mask before the logits exist."""

    def precompute_mask(self) -> None: ...


@runtime_checkable
class ForcedTokenMatcher(Protocol):
    """A matcher that can tell which ids must follow, whatever is sampled."""

    def forced_tokens(self, most: int) -> list[int]:
        """Return at most `most` ids. They are draft tokens: the model may spell the same text with
        other ids.
        """


class ConstraintSource(Struct, frozen=True):
    """A constraint as text, for engines that enforce constraints themselves."""

    format: ConstraintFormat
    text: str
    after_reasoning: bool = False
    """Whether the answer may reason first; the constraint then applies after the reasoning."""


class JobConstraint(Protocol):
    """The constraint of a job, checked and ready: the client has already been told what is wrong with it."""

    def new_matcher(self) -> Matcher:
        """Return a matcher for one continuation."""

    @property
    def source(self) -> ConstraintSource | None:
        """The constraint as text, in a form that the engine's card names; None if it names none."""


class Job(Struct, frozen=True, kw_only=True):
    """A request to an engine: `n` continuations of one prompt."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    text: str = ""
    conversation: "Conversation | None" = None
    """The prompt as text, or as messages if it has media, for engines whose cards ask for it."""
    media: tuple[MediaSpan, ...] = ()
    """Images and audio of the prompt, in order."""
    n: int = 1
    constraint: JobConstraint | None = None
    """Only for engines whose card says that they enforce constraints, or which sources they accept."""
    adapters: Adapters = ()
    owner: str = ""
    """The hashed API key. Owners with jobs should get equal shares of the engine's time."""
    priority: int = 0
    """Lower runs first. No owner can choose a value that delays the jobs of others."""
    reuse_prefix: bool = True
    cache_salt: str = ""
    """Jobs share a cached prefix only if they have the same salt."""
    routing_hints: tuple[str, ...] = ()
    """Routing hints: this answer's id, then the client's own. The replica that saw one last probably has the
    prefix cached.
    """
    trace_headers: Mapping[str, str] | None = None
    """W3C trace headers, for engines that call other servers or make spans themselves."""

    @property
    def adapter(self) -> str | None:
        """The only adapter, at full strength, for engines whose card does not say that they combine
        adapters.
        """
        return self.adapters[0][0] if self.adapters else None


class TokenLogprob(Struct, frozen=True):
    """The log probability of one id, before temperature and masks, with the most likely ids at that
    position.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Step(Struct, omit_defaults=True):
    """One step of one continuation of a job, as the engine reports it."""

    ids: list[int]
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop_id: int | None = None
    """The stop id that ended the continuation, if one did; it is the last of `ids`."""
    error: Exception | None = None
    """With finish "error": the error."""
    cached_tokens: int | None = None
    """On a job's first step: how many prompt ids came from the prefix cache."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """On a job's first step, if requested: one entry per prompt id; the first is None."""
    weight_version: str | None = None
    """The version of the weights that computed it, for engines that are trained while they serve."""
    prompt_tokens: int | None = None
    """The length of the prompt, if it differs from the number of ids in the job; set with `cached_tokens`."""


class TextStep(Step, kw_only=True):
    """A step of an engine that returns text, as its card must say: `TextStep([], text="Hel")`."""

    text: str = ""
    """The new text."""
    tokens: int = 0
    """How many tokens the text has, if the engine knows."""


Sink: TypeAlias = Callable[[Step], None]


class Event(Struct):
    """A chunk of an answer. The ids of a choice's events, concatenated, are the ids of its steps."""

    kind: EventKind
    choice: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop: str | int | None = None
    """On a finish: the stop string or stop id that matched; None at the model's own end."""
    error: Exception | None = None
    call: int = 0
    """On the events of a tool call: its number in the answer, from 0. `text` of a call_open is the name."""
    call_id: str = ""
    """On a call_open: the id that the model wrote, or a generated one."""
    part_chars: int | None = None
    """Set on the first event of a part: how many of the last characters received belong to it, marker
    included.
    """


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool call. `arguments` is the JSON text that the model wrote, incomplete if the answer was cut
    off.
    """

    id: str | None
    name: str
    arguments: str


class Answer(Struct):
    """A complete answer, folded from the events of one choice."""

    choice: int = 0
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | int | None = None

    def mean_logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs) / max(len(self.logprobs), 1)


class Message(Struct, frozen=True, kw_only=True):
    role: Role
    content: str | list[dict[str, Any]] | None = None
    """Content parts are not joined, because some templates need them: `{"type": "image", "media": KEY}`."""
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class Conversation(Struct, frozen=True, kw_only=True):
    """The input of a chat template."""

    param: ClassVar[str] = CONVERSATION
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    documents: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    response_prefix: str = ""
    template: str | None = None
    """The name of one of the model's templates, for models with several."""
    media: Mapping[str, Media] = field(default_factory=dict)
    media_params: Mapping[str, str] = field(default_factory=dict)
    """Media in the messages, and the request fields that hold them, both by `Media.key`."""

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """The messages before the answer; with `continue_final_message` the answer continues the last one."""
        return self.messages[:-1] if self.continue_final_message else self.messages


class TextPrompt(Struct, frozen=True):
    """A prompt as text. Special tokens in it are recognized: completions are the raw interface."""

    text: str
    suffix: str | None = None
    add_special_tokens: bool = True
    param: str = PROMPT
    """The request field that it came in."""


class IdsPrompt(Struct, frozen=True):
    ids: tuple[int, ...]
    param: str = PROMPT


Prompt: TypeAlias = Conversation | TextPrompt | IdsPrompt


class TurnRecord(Struct, frozen=True, kw_only=True):
    """One turn of a model: the ids of its prompt and the ids it sampled."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()
    logprobs: tuple[float, ...] | None = None
    """The log probabilities of `ids`, if the engine was asked for them."""
    finish: FinishReason | None = None
    choice: int = 0
    weight_version: str | None = None
    source: str = ""
    """The id of the answer that the turn belongs to."""
    continues: str | None = field(name="after", default=None)
    """The answer whose ids the prompt continues."""
    reused_ids: int = field(name="kept", default=0)
    """How many ids of the prompt come from that answer and the turns before it."""
    dropped_ids: tuple[int, ...] = field(name="cut", default=())
    """The last ids of that answer if the prompt lacks them, because the template writes another end."""
    break_reason: str = field(name="split", default="")
    """The reason if the prompt does not continue all ids of the answer before it."""
    history: str = "template"
    """Whether the prompt was to have earlier answers as the template renders them or as they were sampled."""
    message_digest: bytes = field(name="said", default=b"")
    """Digest of the assistant message as the client received it."""
    prompt_key: bytes = field(name="key", default=b"")
    """The key of the cached prompt; empty where nothing can continue it."""

    @property
    def all_ids(self) -> tuple[int, ...]:
        return self.prompt + self.ids

    @property
    def total_ids(self) -> int:
        """The number of ids in prompt and answer."""
        return len(self.prompt) + len(self.ids)


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    restored_tokens: int = 0
    """Prompt tokens of reasoning that the client had dropped and that was put back."""

    def log_fields(self) -> dict[str, int]:
        """Return the fields of the access log line."""
        names = ("prompt_tokens", "completion_tokens", "cached_tokens", "restored_tokens")
        return {name: count for name in names if (count := getattr(self, name)) or name != names[-1]}

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))


# An answer is always folded from the events of its stream.


JOINED = frozenset({"text", "reasoning", "call_arguments"})
MOST_IDS = 512
"""Events with at least this many ids are not joined further: serializing such an event takes long."""


class AnswerTranscript:
    """One answer so far, in fragments that are joined once, at the end."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[list[str]] = []
        """Runs of reasoning, separated by text or calls."""
        self.calls: list[tuple[str, str, list[str]]] = []
        """Ids, names and arguments."""
        self._thinks = False

    def add(self, event: Event) -> None:
        kind = event.kind
        if kind == "text":
            self._thinks = False
            self.texts.append(event.text)
        elif kind == "reasoning":
            if not self._thinks:
                self._thinks = True
                self.thoughts.append([])
            self.thoughts[-1].append(event.text)
        elif kind == "call_arguments":
            self.calls[event.call][2].append(event.text)
        elif kind == "call_open":
            self._thinks = False
            self.calls.append((event.call_id, event.text, []))

    @property
    def runs(self) -> list[str]:
        return ["".join(pieces) for pieces in self.thoughts]

    @property
    def made_calls(self) -> list[ToolCall]:
        return [ToolCall(id=id_, name=name, arguments="".join(pieces)) for id_, name, pieces in self.calls]

    def message(self, begun: str) -> "Message":
        """Return the answer as a message; `begun` is the text that the client had written for it."""
        texts, calls = "".join(self.texts), tuple(self.made_calls)
        return Message(role="assistant", content=begun + texts, tool_calls=calls)


class EventFold:
    """Builds answers from events: `EventFold(2)` has two; `add(events)` extends them."""

    def __init__(self, choices: int = 1) -> None:
        self.answers = [Answer(choice) for choice in range(choices)]
        self._said = [AnswerTranscript() for _ in range(choices)]

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            answer = self.answers[event.choice]
            answer.ids += event.ids
            if event.logprobs:
                answer.logprobs += event.logprobs
            if event.kind == "finish":
                answer.finish, answer.stop = event.finish, event.stop
            else:
                self._said[event.choice].add(event)

    def done(self) -> list[Answer]:
        for answer, transcript in zip(self.answers, self._said, strict=True):
            answer.text, answer.reasoning = "".join(transcript.texts), "".join(transcript.runs)
            answer.calls = transcript.made_calls
        return self.answers


def fold(events: Iterable[Event]) -> Answer:
    """Build the answer from the events of one choice."""
    (folded := EventFold()).add(events)
    return folded.done()[0]


def coalesce(events: list[Event]) -> list[Event]:
    """Join adjacent events of the same kind and choice, for a client that reads slowly."""
    merged: list[Event] = []
    runs: dict[int, tuple[Event, list[str]]] = {}
    for event in events:
        before, texts = runs.get(event.choice, (None, []))
        alike = before is not None and before.kind == event.kind and event.kind in JOINED
        if before is not None and alike and len(before.ids) < MOST_IDS:
            texts.append(event.text)
            before.ids = before.ids + event.ids
            if event.logprobs:
                before.logprobs = (before.logprobs or []) + event.logprobs
            continue
        if before is not None:
            before.text = "".join(texts)
        merged.append(event)
        runs[event.choice] = event, [event.text]
    for event, texts in runs.values():
        event.text = "".join(texts)
    return merged
