"""What an engine is. Token ids in, token ids out; it knows nothing of chat, JSON or HTTP."""

import re
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct, field
from msgspec.structs import replace

from dragoman.errors import BadRequest
from dragoman.media import Media, MediaKind
from dragoman.types import UNBOUNDED, Job, Sampling, Sink, SourceForm, Step

UNSUPPORTABLE = frozenset(Sampling.__struct_fields__) - {"max_tokens", "samplers"} | {
    "priority",
    "cache_salt",
    "reuse_prefix",
}
"""What an engine may say that it cannot do: fields of Sampling and of Job."""
BYTES_A_TOKEN = 4
"""About, where nobody can count them."""
LONG_SUMMARY = 1024
"""Tokens that a summary may have, however little it is of."""
OF_SAMPLED_IDS = frozenset({"return_token_ids", "logprobs", "history"})
OF_IDS = OF_SAMPLED_IDS | {
    "prompt_logprobs",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "stop_token_ids",
    "truncate_prompt_tokens",
}
"""What a request cannot have where there are no ids."""


BEHIND = 2**30
"""Priorities from here on are of work that nobody waits for: it is computed where there is room."""


def behind_owner(owner: str) -> str:
    """What a key has of such work is counted apart from its own requests."""
    return f"\0{owner}"


def is_behind(owner: str) -> bool:
    return owner.startswith("\0")


class ModelCard(Struct, kw_only=True):
    """What there is to know about the model an engine runs."""

    name: str
    max_model_len: int | None = None
    """Prompt and answer together, in tokens, for one sequence. None: only the engine knows."""
    dimensions: int | None = None
    """Of its vectors. Where an engine does not say, it is known from the first one that it makes."""
    slots: int | None = None
    """Sequences that it computes at the same time, where it knows; more wait outside of it."""
    makes_way: bool = False
    """Whether an answer that nobody waits for gives up its place to others by itself, and goes on later."""
    embeds_at_once: int | None = None
    """Calls of `embed` and `score` that it works on at the same time; None: as many as it is given."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Chat templates by name; the usual one is called "default"."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts that templates know by name, such as `pad_token`, besides `bos_token` and `eos_token`."""
    adapters: Sequence[str] = ()
    """By their public names. The server changes this where it loads others."""
    mixes_adapters: bool = False
    """Whether a job may have several adapters, and scales other than 1."""
    constrains: bool = False
    """Whether the engine steps each answer with its job's constraint. If not, such requests are refused."""
    sources: Collection[SourceForm] = ()
    """Or the forms of constraints that it keeps to by itself, as text. What has none of these is refused."""
    skips_reasoning: bool = False
    """Whether it can hold the answer to a source only after the reasoning."""
    unsupported: frozenset[str] = frozenset()
    """Fields of `UNSUPPORTABLE` that the engine does not honour. A request that uses one is refused."""
    has_samplers: bool = False
    """Whether it honours `Sampling.samplers`. If not, requests that ask for one of them are refused."""
    sampling: Mapping[str, int | float] = field(default_factory=dict)
    """Fields of Sampling as the model's makers recommend them, for requests that leave them open."""
    modalities: frozenset[MediaKind] = frozenset()
    """What it takes beside text. The engine is a MediaEngine then."""
    samples_ids: bool = True
    """False where answers are text: then no ids of them are given out, for nobody has seen any sampled."""
    has_ids: bool = True
    """False where there is no tokenizer either: then requests that are about ids are refused."""
    takes_text: bool = False
    """Whether jobs are to have their prompt as text, too."""
    takes_chat: bool = False
    """Whether jobs with pictures or sounds are to have the conversation that their prompt was made of."""
    created: int = 0
    numerics: str = ""
    """Stands for what decides the answers to a request: weights, kernels, precision. It goes into
    `system_fingerprint`."""
    details: Mapping[str, str] = field(default_factory=dict)
    """For people: architecture, quantization, parameters, runner."""

    def named(self, name: str | None) -> "ModelCard":
        """The same by another name, where there is one."""
        return self if name is None or name == self.name else replace(self, name=name)

    @property
    def refused(self) -> frozenset[str]:
        """The fields that no request may use."""
        if self.samples_ids:
            return self.unsupported
        return self.unsupported | (OF_SAMPLED_IDS if self.has_ids else OF_IDS)

    @property
    def longest(self) -> int:
        """Tokens of a sequence. Without a tokenizer nobody here can count them, and the engine does."""
        return UNBOUNDED if self.max_model_len is None or not self.has_ids else self.max_model_len

    def count(self, prompt: Sequence[int]) -> int:
        """The tokens of a prompt: its ids, or about as many as its bytes stand for."""
        return len(prompt) if self.has_ids else -(-len(prompt) // BYTES_A_TOKEN)

    def room(self, prompt_tokens: int) -> int:
        """Of an answer to so many."""
        return self.longest if self.longest == UNBOUNDED else self.longest - prompt_tokens

    def summary_room(self, size: int) -> int:
        """Of a summary of so many bytes: models that write on and on would else do so for minutes."""
        return max(min(self.longest // 4, max(LONG_SUMMARY, size // BYTES_A_TOKEN)), 1)


@runtime_checkable
class Tokenizer(Protocol):
    """Plain attributes will do; they are properties here only so that any type that fits is taken."""

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes of every id; its length is the vocabulary's size. Special tokens have their text here."""

    @property
    def special(self) -> Mapping[str, int]:
        """Control tokens by their text. Text from a client never becomes one of these."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def end_ids(self) -> frozenset[int]:
        """Every id that ends a turn or a text."""

    @property
    def add_bos(self) -> bool:
        """Whether a raw text prompt starts with BOS in this model."""

    @property
    def infill(self) -> tuple[int, int, int] | None:
        """The prefix, suffix and middle ids of models that can fill a gap."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text` as plain text: never a control token, never a BOS."""


# Engines that speak text. Their answers are text from the first word to the last, and are read as that
# (`TextStep`): nothing is taken for ids that nobody has sampled. With a tokenizer at hand prompts are ids as
# always, and answers are counted by it. Without one there are no ids at all: prompts go to the engine as
# text, and a request that is about ids is refused.


PIECE_BYTES = 256 * 1024
_CONTROL = re.compile(
    r"<\|[^<>|\s]{1,64}\|>|<\uff5c[^<>\uff5c\s]{1,64}\uff5c>|<(?:start|end)_of_turn>|</?s>|\[/?INST\]"
)
"""What is surely no word of a template, but a token of the model."""


def encode_bytes(text: str) -> list[int]:
    """An id for each byte of UTF-8."""
    data, ids = text.encode(), list[int]()
    for at in range(0, len(data), PIECE_BYTES):
        # Not in one call, which would keep the interpreter to itself.
        ids += data[at : at + PIECE_BYTES]
    return ids


class TextTokenizer:
    """Where there is no tokenizer: an id is a byte, or a control token that is known by name or by its looks.

    Its ids measure prompts, and keep what clients write apart from what a template writes. Nobody sees them.
    """

    add_bos = False
    infill = None

    def __init__(self, special_tokens: Mapping[str, str] | None = None) -> None:
        self.special_tokens = dict(special_tokens or {})
        self.pieces = [bytes([byte]) for byte in range(256)]
        self.special: dict[str, int] = {}
        self._learn(self.special_tokens.values())
        self.bos_id = self.special.get(self.special_tokens.get("bos_token", ""))
        self.eos_id = self.special.get(self.special_tokens.get("eos_token", ""))
        self.end_ids = frozenset[int]() if self.eos_id is None else frozenset({self.eos_id})

    def read_templates(self, sources: Iterable[str]) -> None:
        """Learn the control tokens of the templates that prompts are written with."""
        self._learn(token for source in sources for token in _CONTROL.findall(source))

    def _learn(self, texts: Iterable[str]) -> None:
        for text in texts:
            if text and text not in self.special:
                self.special[text] = len(self.pieces)
                self.pieces.append(text.encode())

    def encode(self, text: str) -> list[int]:
        return encode_bytes(text)


def count_text(tokenizer: Tokenizer, text: str) -> int:
    """By the tokenizer; without one it is a guess."""
    if isinstance(tokenizer, TextTokenizer):
        return -(-len(text.encode()) // BYTES_A_TOKEN)
    return len(tokenizer.encode(text))


def check_has_ids(card: ModelCard, what: str, param: str | None = None) -> None:
    """Raises where there is no tokenizer: `check_has_ids(card, "a prompt of ids", "prompt")`."""
    if not card.has_ids:
        message = f"This model is served without a tokenizer, so there are no token ids, which {what} needs."
        raise BadRequest(message, param=param, code="unsupported_field")


# What an engine does.


class Handle(Protocol):
    def cancel(self, index: int | None = None) -> None:
        """Stop one continuation, or all. Idempotent; the engine is rid of it within one step."""


@runtime_checkable
class Engine(Protocol):
    @property
    def card(self) -> ModelCard: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def generate(self, job: Job) -> AsyncIterator[Step]:
        """The steps of one continuation: `job.n` is 1 here. Closing the iterator cancels the job."""


@runtime_checkable
class DirectEngine(Engine, Protocol):
    """An engine that can call back, which spares a task switch per token."""

    def submit(self, job: Job, sink: Sink) -> Handle:
        """Start all `n` continuations of a job from the event loop's thread; `sink` is called on that thread.

        One wake-up of the loop per engine step serves the sinks of all jobs.
        """


@runtime_checkable
class LivingEngine(Engine, Protocol):
    """An engine with a life of its own: threads, memory, a device."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def check(self) -> None:
        """Return when the engine has made a round trip; raise EngineFailed when it is dead."""


@runtime_checkable
class PulsingEngine(LivingEngine, Protocol):
    """A living engine of which can be seen from outside whether it gets on, and which can be given up."""

    @property
    def pulse(self) -> int:
        """A number that changes while there is work and the engine gets on with it, also within a step."""

    def abandon(self) -> None:
        """Let go of an engine that is stuck, at once. Its jobs hear no more of it."""


@runtime_checkable
class MediaEngine(Engine, Protocol):
    """An engine whose model sees or hears. Its jobs say in `media` where in the prompt that is."""

    def place(self, media: Media) -> Sequence[int]:
        """The ids that stand in a prompt for a picture or a sound: one for each position that it takes, and
        those that the model wants before, between and behind them.

        From any worker thread: it may take milliseconds. Raises BadRequest for what the model cannot take.
        """


@runtime_checkable
class EmbeddingEngine(Engine, Protocol):
    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """One L2-normalized vector per prompt."""


@runtime_checkable
class SharingEngine(EmbeddingEngine, Protocol):
    """An engine that shares its time out between owners: those of jobs, and those of embeddings as well."""

    async def embed_for(self, owner: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """`embed`, in the name of somebody: `owner` means what it means in a job."""


@runtime_checkable
class ScoringEngine(Engine, Protocol):
    """A cross-encoder: it reads two texts at once, and says how well they fit."""

    async def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """One score per pair of a query and a document; what joins the two is the engine's to add."""


@runtime_checkable
class TrainedEngine(Engine, Protocol):
    """An engine whose weights are changed while it serves, as in reinforcement learning."""

    @property
    def weight_version(self) -> str | None:
        """Which weights are in place; None if nobody has said."""

    async def pause(self) -> None:
        """Return when nothing computes with the weights. New jobs wait; those at work go on after it."""

    async def resume(self, weight_version: str | None = None) -> None:
        """Go on, with the weights of this version where one is given."""


@runtime_checkable
class AdaptableEngine(Engine, Protocol):
    """An engine that takes LoRA adapters while it serves. `Job.adapters` has them by the names given here."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Return when jobs may name it. A name comes once in an engine's life. Raises ModelFileError or
        BadRequest for what it cannot load."""

    async def unload_adapter(self, name: str) -> None:
        """Give back what it takes; there is no job left that names it."""


PLACEHOLDERS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("<|image_pad|>", "<image>", "[IMG]", "<image_soft_token>", "<|image|>", "<IMG_CONTEXT>"),
    "audio": ("<|audio_pad|>", "<|AUDIO|>", "<audio>", "[AUDIO]", "<audio_soft_token>", "<|audio|>"),
}


def placeholder_id(tokenizer: Tokenizer, kind: MediaKind) -> int:
    """One id for a whole picture or sound, where only whoever computes knows how many there are."""
    known = tokenizer.special
    return next((known[text] for text in PLACEHOLDERS[kind] if text in known), tokenizer.eos_id or 0)


def weights_of(engine: Engine) -> str | None:
    """The version of the weights in place, where the engine has one. A number will do."""
    version = getattr(engine, "weight_version", None)
    return None if version is None else str(version)


class EngineFaults(Struct):
    """Counters of what went wrong since an engine was opened first."""

    failed_steps: int = 0
    """Steps that raised, or whose logits were not numbers."""
    rebuilds: int = 0
    """How often what computes was set up again, with the engine still there."""
    restarts: int = 0
    """How often the engine was opened anew."""


def faults_of(engine: Engine) -> EngineFaults | None:
    """The counters of an engine that has `faults`."""
    faults: EngineFaults | None = getattr(engine, "faults", None)
    return faults


def kv_usage_of(engine: Engine) -> float | None:
    """The part of its memory for keys and values that is in use, from 0 to 1, where it has a `kv_usage`."""
    used: float | None = getattr(engine, "kv_usage", None)
    return used
