"""The vocabulary: what an engine is asked, what it says, and what becomes of it.

Structs rather than dataclasses: several are made per token. The fold at the end is the one way to an answer.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from msgspec import Struct, field

from dragoman.errors import CONVERSATION, PROMPT
from dragoman.media import Media, MediaSpan

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]
SourceForm: TypeAlias = Literal["json_schema", "regex", "choice", "gbnf", "lark", "structural_tag"]
"""`choice` is a list of texts as JSON, `lark` is what llguidance reads, `structural_tag` is xgrammar's."""
LARK_LINE = "%llguidance {}\n"
"""The first line of a grammar that is Lark, whatever the others look like."""
Restoring: TypeAlias = Literal["off", "tools", "all"]
"""To which messages thoughts are given back: none, those with calls since the last user's, or all."""
UNBOUNDED = 2**31 - 1
"""Tokens, where nobody knows how many there may be: as `max_tokens`, as many as the engine likes."""
Adapters: TypeAlias = tuple[tuple[str, float], ...]
"""LoRA adapters and their scales, in the order of their names."""
Kind: TypeAlias = Literal[
    "text", "reasoning", "call_open", "call_arguments", "call_close", "unseen", "finish"
]
"""`unseen` has ids that no text comes of, and that belong to what was said before: what closed it, layout."""

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
"""Who narrows the choice first, where the client does not say."""


class Samplers(Struct, frozen=True, kw_only=True):
    """Ways to choose beyond the usual ones. As they are here, none of them does anything."""

    order: tuple[SamplerName, ...] = SAMPLER_ORDER
    """Those that are not in it are not applied, the usual ones neither."""
    penalty_range: int | None = None
    """How many of the newest ids penalties look at; None: all."""
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
    """How many of the newest ids are looked at; None: all of the prompt and the answer."""
    dry_breakers: frozenset[int] = frozenset()
    """Ids at which a repetition ends."""

    @property
    def acts(self) -> bool:
        """Whether anything in it is on."""
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
    """How the next id is chosen. The defaults sample from the model's own distribution, unchanged."""

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
    """How many alternatives to report beside each sampled id; None reports nothing at all."""
    prompt_logprobs: int | None = None
    samplers: Samplers | None = None
    """Only for engines whose card says that they have them."""

    @property
    def most(self) -> int | None:
        """`max_tokens` for engines that know a bound of their own; None leaves it to them."""
        return None if self.max_tokens == UNBOUNDED else self.max_tokens


class Matcher(Protocol):
    """One answer's way through a constraint, stepped by the ids of that answer."""

    def mask(self, row: Any) -> None:
        """Set the logits of all ids that may not come next to minus infinity, in a numpy row of float32."""

    def accept(self, id_: int) -> None:
        """The id was chosen."""

    @property
    def accepting(self) -> bool:
        """The answer may end here."""

    @property
    def over(self) -> bool:
        """The answer is complete: nothing may follow but an end id."""


@runtime_checkable
class Preparing(Protocol):
    """A matcher that can work out its mask before there is a row."""

    def prepare(self) -> None: ...


@runtime_checkable
class Foreseeing(Protocol):
    """A matcher that can tell what has to come next, whatever is chosen."""

    def foresee(self, most: int) -> list[int]:
        """At most so many ids. They are guesses: another way to write the same may be chosen."""


class ConstraintSource(Struct, frozen=True):
    """A constraint as text."""

    form: SourceForm
    text: str
    after_reasoning: bool = False
    """The answer may reason first, and is held to it from there on."""


class JobConstraint(Protocol):
    """What an answer must be. It is ready to use: what can be wrong with it was told to the client."""

    def start(self) -> Matcher:
        """A matcher for one continuation."""

    @property
    def source(self) -> ConstraintSource | None:
        """The same as text, in one of the forms that the engine's card names; None if it names none."""


class Job(Struct, frozen=True, kw_only=True):
    """What an engine is asked: `n` continuations of one prompt."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    text: str = ""
    conversation: "Conversation | None" = None
    """The prompt as text, and as messages where it has media, for engines whose cards say so."""
    media: tuple[MediaSpan, ...] = ()
    """What the prompt shows and plays, in order."""
    n: int = 1
    constraint: JobConstraint | None = None
    """Only for engines whose card says that they constrain, or what sources they take."""
    adapters: Adapters = ()
    owner: str = ""
    """Whose it is, as a hash: of an engine's time every owner that has jobs should have an equal share."""
    priority: int = 0
    """Lower goes first. No owner can choose one that keeps others waiting."""
    reuse_prefix: bool = True
    cache_salt: str = ""
    """Prefixes are shared only between jobs with the same salt."""
    hints: tuple[str, ...] = ()
    """Who had one of these last has its beginning: the id of its answer, then what the client says of it."""
    trace: Mapping[str, str] | None = None
    """Headers of the trace that it belongs to (W3C), for engines that ask others or have spans themselves."""

    @property
    def adapter(self) -> str | None:
        """The only one, at its full strength, for engines whose card does not say that they mix adapters."""
        return self.adapters[0][0] if self.adapters else None


class TokenLogprob(Struct, frozen=True):
    """The log probability of one id, before temperature and masks, and the most likely ids at that place."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Step(Struct, omit_defaults=True):
    """What an engine says of one continuation of one job at one of its steps."""

    ids: list[int]
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop_id: int | None = None
    """The id that ended it, when it was a stop id; it is the last of `ids`."""
    error: Exception | None = None
    """With finish "error": what went wrong."""
    cached_tokens: int | None = None
    """On a job's first step: prompt ids that were not computed again."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """On a job's first step, if asked: one per prompt id; the first is None."""
    weight_version: str | None = None
    """Which weights computed it, for engines that are trained while they serve."""
    prompt_tokens: int | None = None
    """How many the prompt has, where that is not how many ids the job has: told with `cached_tokens`."""


class TextStep(Step, kw_only=True):
    """What an engine says that speaks text: `TextStep([], text="Hel")`. Its card says so, too."""

    text: str = ""
    """What is new."""
    tokens: int = 0
    """How many tokens that was, where the engine knows."""


Sink: TypeAlias = Callable[[Step], None]


class Event(Struct):
    """One piece of an answer. The ids of a choice's events, put together, are the ids of its steps."""

    kind: Kind
    choice: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop: str | int | None = None
    """On a finish: the stop string or stop id that was met; None at the model's own end."""
    error: Exception | None = None
    call: int = 0
    """On the events of a tool call: its number in the answer, from 0. `text` of a call_open is the name."""
    call_id: str = ""
    """On a call_open: the id the model wrote, or one made up."""
    begins: int | None = None
    """On the first event of a part: how many characters of what was read are its own, with its marker."""


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool call. `arguments` is the JSON text the model wrote, cut short if the model was."""

    id: str | None
    name: str
    arguments: str


class Answer(Struct):
    """What the events of one choice fold to."""

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
    """Parts are kept as parts, because some templates want them so: `{"type": "image", "media": KEY}`."""
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class Conversation(Struct, frozen=True, kw_only=True):
    """What a chat template is rendered with."""

    param: ClassVar[str] = CONVERSATION
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    documents: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    response_prefix: str = ""
    template: str | None = None
    """The name of one of the model's templates, for models that have several."""
    media: Mapping[str, Media] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    """What its messages show and play, and the fields of the request that have it, both by `Media.key`."""

    @property
    def before(self) -> tuple[Message, ...]:
        """The messages before the answer, which may go on with the last of them."""
        return self.messages[:-1] if self.continue_final_message else self.messages


class TextPrompt(Struct, frozen=True):
    """A prompt as text. Special tokens in it are taken as such: completions are the raw interface."""

    text: str
    suffix: str | None = None
    add_special_tokens: bool = True
    param: str = PROMPT
    """The field that it came in."""


class IdsPrompt(Struct, frozen=True):
    ids: tuple[int, ...]
    param: str = PROMPT


Prompt: TypeAlias = Conversation | TextPrompt | IdsPrompt


class Traced(Struct, frozen=True, kw_only=True):
    """One turn of a model as it was: what it was shown, and what it sampled."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    media: tuple[MediaSpan, ...] = ()
    logprobs: tuple[float, ...] | None = None
    """Of the ids, where the engine was asked for them."""
    finish: FinishReason | None = None
    choice: int = 0
    weight_version: str | None = None
    source: str = ""
    """The answer that it belongs to, by its id."""
    after: str | None = None
    """The answer whose ids the prompt goes on from."""
    kept: int = 0
    """How many ids of the prompt are those of that answer, and of what was before it."""
    cut: tuple[int, ...] = ()
    """The last ids of that answer, which the prompt has not: its end, where the template writes another."""
    split: str = ""
    """Why the prompt does not go on from all ids of the answer before it, if it does not."""
    history: str = "template"
    """How the prompt was to have earlier answers."""
    said: bytes = b""
    """Stands for what the client was told, as a message."""
    key: bytes = b""
    """What the prompt is remembered by; empty where nothing can go on from it."""

    @property
    def all(self) -> tuple[int, ...]:
        return self.prompt + self.ids

    @property
    def count(self) -> int:
        """Of all of them."""
        return len(self.prompt) + len(self.ids)


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    restored_tokens: int = 0
    """Of prompts: reasoning that the client had not sent, and that was given back."""

    def facts(self) -> dict[str, int]:
        """What a line of the log says of it."""
        names = ("prompt_tokens", "completion_tokens", "cached_tokens", "restored_tokens")
        return {name: count for name in names if (count := getattr(self, name)) or name != names[-1]}

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))


# A stream's events folded into the whole answer. There is no other way to an answer.


JOINED = frozenset({"text", "reasoning", "call_arguments"})
MOST_IDS = 512
"""Of an event that others are joined to: with more, writing it would take long."""


class Saying:
    """What one answer has so far, in pieces: joined once, at the end."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[list[str]] = []
        """Runs of reasoning: something else was said between two of them."""
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
        """As it is sent back, behind what a client had begun to write."""
        texts, calls = "".join(self.texts), tuple(self.made_calls)
        return Message(role="assistant", content=begun + texts, tool_calls=calls)


class Fold:
    """`Fold(2)` holds two answers; `add(events)` grows them."""

    def __init__(self, choices: int = 1) -> None:
        self.answers = [Answer(choice) for choice in range(choices)]
        self._said = [Saying() for _ in range(choices)]

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
        for answer, said in zip(self.answers, self._said, strict=True):
            answer.text, answer.reasoning = "".join(said.texts), "".join(said.runs)
            answer.calls = said.made_calls
        return self.answers


def fold(events: Iterable[Event]) -> Answer:
    """The answer that the events of one choice tell."""
    (folded := Fold()).add(events)
    return folded.done()[0]


def coalesce(events: list[Event]) -> list[Event]:
    """Neighbours of one kind and choice become one: what a client that reads slowly gets."""
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
