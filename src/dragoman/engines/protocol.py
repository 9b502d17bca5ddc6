"""The engine protocol: token ids in, token ids out. An engine knows nothing of chat, JSON or HTTP."""

import re
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct, field
from msgspec.structs import replace

from dragoman.errors import BadRequest, EngineFailed
from dragoman.media import Media, MediaKind
from dragoman.types import UNBOUNDED, ConstraintFormat, Job, Sampling, Sink, Step

OPTIONAL_FIELDS = frozenset(Sampling.__struct_fields__) - {"max_tokens", "samplers"} | {
    "priority",
    "cache_salt",
    "reuse_prefix",
}
"""Fields of Sampling and Job that an engine may declare as unsupported in `ModelCard.unsupported`."""
BYTES_PER_TOKEN = 4
"""Bytes per token: an estimate for texts without a tokenizer."""
LONG_SUMMARY = 1024
"""Tokens that a summary may always have, however short the summarized text is."""
OF_SAMPLED_IDS = frozenset({"return_token_ids", "logprobs", "history"})
OF_IDS = OF_SAMPLED_IDS | {
    "prompt_logprobs",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "stop_token_ids",
    "truncate_prompt_tokens",
}
"""Request fields that need token ids; refused where an engine has none. `OF_SAMPLED_IDS`: those that need
the ids of the answer.
"""


BACKGROUND_PRIORITY = 2**30
"""Priorities from this value on mark background work: it is computed only when capacity is free."""


def background_owner(owner: str) -> str:
    """Return the owner that a key's background work is counted under, apart from its foreground requests."""
    return f"\0{owner}"


def is_background(owner: str) -> bool:
    return owner.startswith("\0")


class ModelCard(Struct, kw_only=True):
    """Description of the model that an engine runs, and of what the engine supports."""

    name: str
    max_model_len: int | None = None
    """Maximum tokens of prompt and answer together. None: known only to the engine."""
    dimensions: int | None = None
    """Length of an embedding vector. If unset, it is taken from the first vector that the engine returns."""
    slots: int | None = None
    """Sequences that the engine computes at once, if known; further ones wait in the server's queue."""
    preempts_background: bool = False
    """Whether the engine preempts background answers by itself and resumes them later."""
    max_concurrent_embeds: int | None = None
    """Concurrent calls of `embed` and `score` that the engine can work on; None: no limit."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Chat templates by name; the default template is called "default"."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts of further tokens by the names that templates use, such as `pad_token`; besides `bos_token`
    and `eos_token`.
    """
    adapters: Sequence[str] = ()
    """Public names of the loaded LoRA adapters. The server updates this when it loads or unloads one."""
    combines_adapters: bool = False
    """Whether a job may combine several adapters, or use a scale other than 1."""
    constrains: bool = False
    """Whether the engine applies `Job.constraint` to each sampled token. If not, such requests are
    refused.
    """
    constraint_formats: Collection[ConstraintFormat] = ()
    """Constraint formats that the engine enforces itself, given as source text. A constraint in none of
    them is refused.
    """
    constrains_after_reasoning: bool = False
    """Whether the engine can apply a constraint source only after the reasoning."""
    unsupported: frozenset[str] = frozenset()
    """Fields of `OPTIONAL_FIELDS` that the engine does not honor. Requests that use one are refused."""
    has_samplers: bool = False
    """Whether the engine honors `Sampling.samplers`. If not, requests that set it are refused."""
    recommended_sampling: Mapping[str, int | float] = field(default_factory=dict)
    """Sampling defaults that the model's authors recommend, for fields that a request leaves unset."""
    modalities: frozenset[MediaKind] = frozenset()
    """Media kinds that the model takes besides text. If there are any, the engine is a `MediaEngine`."""
    returns_ids: bool = True
    """False if the engine returns text instead of ids: then the server returns no ids of answers either."""
    has_tokenizer: bool = True
    """False if there is no tokenizer either: then requests that are about ids are refused."""
    wants_prompt_text: bool = False
    """Whether `Job.text` must hold the prompt as text, too."""
    wants_conversation: bool = False
    """Whether jobs with media must carry the conversation that their prompt was rendered from."""
    created: int = 0
    numerics: str = ""
    """Identifier of everything that decides the answer to a request: weights, kernels, precision. Part of
    `system_fingerprint`.
    """
    details: Mapping[str, str] = field(default_factory=dict)
    """Details to display: architecture, quantization, parameters, runner."""

    def named(self, name: str | None) -> "ModelCard":
        """Return the card under another name; the same card if `name` is None."""
        return self if name is None or name == self.name else replace(self, name=name)

    @property
    def refused_fields(self) -> frozenset[str]:
        """Fields that no request may use."""
        if self.returns_ids:
            return self.unsupported
        return self.unsupported | (OF_SAMPLED_IDS if self.has_tokenizer else OF_IDS)

    @property
    def context_tokens(self) -> int:
        """Maximum tokens of a sequence. Unbounded without a tokenizer: then only the engine can count
        tokens.
        """
        return UNBOUNDED if self.max_model_len is None or not self.has_tokenizer else self.max_model_len

    def count(self, prompt: Sequence[int]) -> int:
        """Count the tokens of a prompt: exactly with a tokenizer, else estimated from its bytes."""
        return len(prompt) if self.has_tokenizer else -(-len(prompt) // BYTES_PER_TOKEN)

    def remaining_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens are left for the answer to a prompt of this length."""
        return (
            self.context_tokens if self.context_tokens == UNBOUNDED else self.context_tokens - prompt_tokens
        )

    def summary_room(self, size: int) -> int:
        """Return the maximum tokens of a summary of `size` bytes; some models would otherwise generate for
        minutes.
        """
        return max(min(self.context_tokens // 4, max(LONG_SUMMARY, size // BYTES_PER_TOKEN)), 1)


@runtime_checkable
class Tokenizer(Protocol):
    """A model's tokenizer. The members are properties only so that any attribute of a fitting type is
    accepted.
    """

    @property
    def pieces(self) -> Sequence[bytes]:
        """Bytes of every id; the length is the vocabulary size. Special tokens are represented by their
        text.
        """

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Special token ids by text. Text from a client never becomes one of these."""

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
        """The prefix, suffix and middle ids of models that support fill-in-the-middle."""

    def encode(self, text: str) -> list[int]:
        """Encode `text` as plain text: never a special token, never a BOS."""


# Engines that return text. Their whole answer is handled as text (`TextStep`), and no ids are derived from it
# as if they had been sampled. If a tokenizer is available, prompts are ids as usual and answers are counted
# with it. Without one there are no ids at all: prompts go to the engine as text, and a request that is about
# ids is refused.


CHUNK_BYTES = 256 * 1024
_CONTROL = re.compile(
    r"<\|[^<>|\s]{1,64}\|>|<\uff5c[^<>\uff5c\s]{1,64}\uff5c>|<(?:start|end)_of_turn>|</?s>|\[/?INST\]"
)
"""Pattern of special tokens in a chat template that cannot be ordinary words."""


def encode_bytes(text: str) -> list[int]:
    """Return one id for each byte of UTF-8."""
    data, ids = text.encode(), list[int]()
    for at in range(0, len(data), CHUNK_BYTES):
        # In chunks: one long call would hold the GIL.
        ids += data[at : at + CHUNK_BYTES]
    return ids


class FallbackTokenizer:
    """Fallback where no tokenizer is available: an id is a byte, or a special token known by name or by its
    form.

    Its ids measure prompts, and keep the client's text apart from the template's special tokens. They are
    never returned to a client.
    """

    add_bos = False
    infill = None

    def __init__(self, special_tokens: Mapping[str, str] | None = None) -> None:
        self.special_tokens = dict(special_tokens or {})
        self.pieces = [bytes([byte]) for byte in range(256)]
        self.special_ids: dict[str, int] = {}
        self._learn(self.special_tokens.values())
        self.bos_id = self.special_ids.get(self.special_tokens.get("bos_token", ""))
        self.eos_id = self.special_ids.get(self.special_tokens.get("eos_token", ""))
        self.end_ids = frozenset[int]() if self.eos_id is None else frozenset({self.eos_id})

    def read_templates(self, sources: Iterable[str]) -> None:
        """Add the special tokens found in the templates that prompts are rendered with."""
        self._learn(token for source in sources for token in _CONTROL.findall(source))

    def _learn(self, texts: Iterable[str]) -> None:
        for text in texts:
            if text and text not in self.special_ids:
                self.special_ids[text] = len(self.pieces)
                self.pieces.append(text.encode())

    def encode(self, text: str) -> list[int]:
        return encode_bytes(text)


def count_text(tokenizer: Tokenizer, text: str) -> int:
    """Count the tokens of a text with the tokenizer; estimate them if there is none."""
    if isinstance(tokenizer, FallbackTokenizer):
        return -(-len(text.encode()) // BYTES_PER_TOKEN)
    return len(tokenizer.encode(text))


def require_tokenizer(card: ModelCard, what: str, param: str | None = None) -> None:
    """Raise BadRequest if the model has no tokenizer: `require_tokenizer(card, "a prompt of ids",
    "prompt")`.
    """
    if not card.has_tokenizer:
        message = f"This model is served without a tokenizer, so it has no token ids; {what} needs them."
        raise BadRequest(message, param=param, code="unsupported_field")


# The engine interfaces.


class JobHandle(Protocol):
    def cancel(self, index: int | None = None) -> None:
        """Stop one continuation, or all. Idempotent; the engine drops it within one step."""


@runtime_checkable
class Engine(Protocol):
    @property
    def card(self) -> ModelCard: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def generate(self, job: Job) -> AsyncIterator[Step]:
        """Yield the steps of one continuation: `job.n` is 1 here. Closing the iterator cancels the job."""


@runtime_checkable
class CallbackEngine(Engine, Protocol):
    """An engine that reports steps through a callback, which saves a task switch per token."""

    def submit(self, job: Job, sink: Sink) -> JobHandle:
        """Start all `n` continuations of a job from the event loop's thread; `sink` is called on that thread.

        One wake-up of the loop per engine step serves the sinks of all jobs.
        """


@runtime_checkable
class LifecycleEngine(Engine, Protocol):
    """An engine with resources to open and close: threads, memory, a device."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def check(self) -> None:
        """Return when the engine has made a round trip; raise EngineFailed if it is dead."""


@runtime_checkable
class HeartbeatEngine(LifecycleEngine, Protocol):
    """A `LifecycleEngine` whose progress can be observed from outside, and which can be abandoned."""

    @property
    def heartbeat(self) -> int:
        """A counter that changes while the engine makes progress, also within a step."""

    def abandon(self) -> None:
        """Release a stuck engine at once. Its jobs get no further steps."""


@runtime_checkable
class MediaEngine(Engine, Protocol):
    """An engine whose model takes images or audio. `Job.media` says where in the prompt they are."""

    def media_token_ids(self, media: Media) -> Sequence[int]:
        """Return the token ids that represent an image or audio in a prompt: one per position that it takes,
        and those that the model expects before, between and after them.

        May be called from any worker thread and take milliseconds. Raises BadRequest for media that the model
        cannot take.
        """


@runtime_checkable
class EmbeddingEngine(Engine, Protocol):
    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return one L2-normalized vector per prompt."""


@runtime_checkable
class OwnerAwareEngine(EmbeddingEngine, Protocol):
    """An engine that shares its compute time fairly between owners, for embeddings as well as for jobs."""

    async def embed_for(self, owner: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Embed in the name of an owner, which means the same as `Job.owner`."""


@runtime_checkable
class ScoringEngine(Engine, Protocol):
    """A cross-encoder: reads two texts together and scores how well they match."""

    async def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """Return one score per pair of query and document. The engine adds the tokens that join the two."""


@runtime_checkable
class PausableEngine(Engine, Protocol):
    """An engine whose weights can be changed while it serves, as in reinforcement learning."""

    @property
    def weight_version(self) -> str | None:
        """Version of the loaded weights; None if unset."""

    async def pause(self) -> None:
        """Return when nothing computes with the weights. New jobs wait; running ones continue after
        `resume`.
        """

    async def resume(self, weight_version: str | None = None) -> None:
        """Continue, and set the version of the weights if one is given."""


@runtime_checkable
class AdapterEngine(Engine, Protocol):
    """An engine that loads LoRA adapters while it serves. `Job.adapters` refers to them by the names given
    here.
    """

    async def load_adapter(self, name: str, path: str) -> None:
        """Return when jobs may use the adapter. A name is used only once in an engine's lifetime. Raises
        ModelFileError or BadRequest for an adapter that cannot be loaded.
        """

    async def unload_adapter(self, name: str) -> None:
        """Free an adapter; no job uses it any more."""


PLACEHOLDERS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("<|image_pad|>", "<image>", "[IMG]", "<image_soft_token>", "<|image|>", "<IMG_CONTEXT>"),
    "audio": ("<|audio_pad|>", "<|AUDIO|>", "<audio>", "[AUDIO]", "<audio_soft_token>", "<|audio|>"),
}


def placeholder_id(tokenizer: Tokenizer, kind: MediaKind) -> int:
    """Return one id for a whole image or audio, where only the engine knows how many positions it takes."""
    known = tokenizer.special_ids
    return next((known[text] for text in PLACEHOLDERS[kind] if text in known), tokenizer.eos_id or 0)


def weights_of(engine: Engine) -> str | None:
    """Return the version of the engine's weights as text, if it has one. A number is accepted."""
    version = getattr(engine, "weight_version", None)
    return None if version is None else str(version)


class RunnerFailed(EngineFailed):
    """The runner failed again after several rebuilds; liveness fails too, for a new process may help."""


class EngineFaults(Struct):
    """Counters of failures since the engine was first opened."""

    failed_steps: int = 0
    """Steps that raised, or whose logits were not finite."""
    rebuilds: int = 0
    """How often the runner was rebuilt inside a running engine."""
    restarts: int = 0
    """How often the engine was opened again."""


def faults_of(engine: Engine) -> EngineFaults | None:
    """Return the counters of an engine that has `faults`."""
    faults: EngineFaults | None = getattr(engine, "faults", None)
    return faults


def kv_usage_of(engine: Engine) -> float | None:
    """Return the used fraction of the KV cache, from 0 to 1, if the engine has a `kv_usage`."""
    used: float | None = getattr(engine, "kv_usage", None)
    return used
