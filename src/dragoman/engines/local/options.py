"""What can be set about the embedded engine, and what is refused before anything is queued for it."""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct, field

from dragoman.errors import ANSWERS, MODEL, PROMPT, BadRequest, ContextOverflow, Part
from dragoman.limits import Limits
from dragoman.media import MediaKind, unsupported
from dragoman.types import Job

RunnerName: TypeAlias = Literal["auto", "llamacpp", "openvino", "torch"]
KvCache: TypeAlias = Literal["auto", "int8", "bf16", "f16"]
WeightKind: TypeAlias = Literal["auto", "int8", "fp8", "bf16"]


class LocalOptions(Struct, frozen=True, kw_only=True):
    """Everything has a default that is worked out from the model and the machine."""

    runner: RunnerName = "auto"
    """What computes. `auto` is the one that was faster when both were tried with this file on this CPU."""
    readers: int | None = None
    """Answers expected at a time, for which runner and weights are chosen; by default `slots`, or one."""
    name: str | None = None
    """The model's public name; by default the name of the file."""
    context: int | None = None
    """Tokens one sequence may hold, prompt and answer together."""
    slots: int | None = None
    """Sequences that are computed at the same time."""
    threads: int | None = None
    """Compute threads; by default one per physical core this process may use."""
    batch: int = 512
    """Most tokens in one engine step, so also the most one step can stall."""
    chunk: int = 128
    """Most prompt tokens in one engine step while other sequences are being decoded."""
    pause: float = 0.13
    """Seconds a step may take, about, that reads prompts beside answers, or half more than without."""
    kv_memory: int | None = None
    """Bytes for keys and values; by default a quarter of the free memory, 2 GiB at most."""
    kv_cache: KvCache = "auto"
    """Keys and values in `int8`, `bf16` or `f16`, llama.cpp's own way; `auto`: 16 bits where possible."""
    weights: WeightKind = "auto"
    """Layers of the runner torch in `int8` or `fp8`, half the memory, or `bf16`; `auto` is that on a GPU."""
    deterministic: bool = False
    """Whether an answer may not depend on others beside it: where that cannot be held, it is an error."""
    guesses: int = 7
    """Most tokens that are guessed ahead in one step, from what was said before; 0 for none."""
    draft: str | None = None
    """A GGUF file of a smaller model with the same vocabulary, which guesses ahead."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters: public name to GGUF file."""
    mmproj: str | None = None
    """A GGUF file with the projector of a model that sees or hears."""
    limits: Limits | None = None
    """Those within which pictures and sounds are decoded; by default the usual ones."""
    gpu_layers: int | None = None
    """Layers that llama.cpp computes on a GPU, where its build has one; by default all, with 0 none."""
    flash_attention: bool = True
    """Fused attention where the architecture can do it: faster on every machine measured."""

    @property
    def adapter_files(self) -> list[Path]:
        return [Path(file).expanduser() for file in self.adapters.values()]


class JobBounds(Protocol):
    """What a runner can hold."""

    @property
    def context(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def adapters(self) -> Sequence[str]: ...


def check_job(job: Job, bounds: JobBounds, modalities: Set[MediaKind] = frozenset()) -> None:
    """Raise BadRequest for a job that cannot be run."""
    check_prompt(job.prompt, bounds)
    for span in job.media:
        if span.media.kind not in modalities:
            raise unsupported(span.media.kind, modalities)
    if job.media and job.sampling.prompt_logprobs is not None:
        message = "Pictures and sounds have no log probabilities: leave out 'prompt_logprobs' and 'echo'."
        raise BadRequest(message, param=Part("prompt_logprobs"))
    if job.n < 1:
        raise BadRequest("A job is for one answer at least.", param=ANSWERS)
    for name, _scale in job.adapters:
        if name not in bounds.adapters:
            known = ", ".join(sorted(bounds.adapters)) or "none"
            raise BadRequest(f"There is no adapter {name!r}; loaded: {known}.", param=MODEL)
    sampling = job.sampling
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        raise BadRequest("'allowed_token_ids' must not be empty.", param=Part("allowed_token_ids"))
    check_ids(Part("allowed_token_ids"), sampling.allowed_token_ids or (), bounds)
    check_ids(Part("logit_bias"), tuple(sampling.logit_bias), bounds)
    check_ids(Part("stop_token_ids"), tuple(sampling.stop_token_ids), bounds)
    check_ids(Part("bad_words"), [token for word in sampling.bad_words for token in word], bounds)


def check_prompt(prompt: Sequence[int], bounds: JobBounds) -> None:
    if not prompt:
        raise BadRequest("The prompt is empty.", param=PROMPT)
    if len(prompt) >= bounds.context:
        raise ContextOverflow.of(len(prompt), bounds.context - 1)
    check_ids(PROMPT, prompt, bounds)


def check_ids(param: Part, ids: Sequence[int], bounds: JobBounds) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < bounds.vocabulary):
        raise BadRequest(f"'{param}' holds an id that is not in the vocabulary.", param=param)
