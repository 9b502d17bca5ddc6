"""What an engine is. Token ids in, token ids out; it knows nothing of chat, JSON or HTTP."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct, field

from dragoman.types import Job, Sampling, Sink, SourceForm, Step

UNSUPPORTABLE = frozenset(Sampling.__struct_fields__) - {"max_tokens", "samplers"} | {
    "priority",
    "cache_salt",
    "reuse_prefix",
}
"""What an engine may say that it cannot do: fields of Sampling and of Job."""


class ModelCard(Struct, kw_only=True):
    """What there is to know about the model an engine runs."""

    name: str
    max_model_len: int
    """Prompt and answer together, in tokens, for one sequence."""
    dimensions: int | None = None
    """Of its vectors. Where an engine does not say, it is known from the first one that it makes."""
    slots: int | None = None
    """Sequences that it computes at the same time, where it knows; more wait outside of it."""
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
    samples_ids: bool = True
    """False where ids are made from text: then they are not given out, for nobody has sampled them."""
    created: int = 0
    numerics: str = ""
    """Stands for what decides the answers to a request: weights, kernels, precision. It goes into
    `system_fingerprint`."""
    details: Mapping[str, str] = field(default_factory=dict)
    """For people: architecture, quantization, parameters, runner."""

    @property
    def refused(self) -> frozenset[str]:
        """The fields that no request may use."""
        return self.unsupported if self.samples_ids else self.unsupported | {"return_token_ids", "logprobs"}


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


def weights_of(engine: Engine) -> str | None:
    """The version of the weights in place, where the engine has one. A number will do."""
    version = getattr(engine, "weight_version", None)
    return None if version is None else str(version)
