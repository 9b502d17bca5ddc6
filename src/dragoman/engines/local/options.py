"""Options of the embedded engine, and checks of jobs before they are queued."""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct, field

from dragoman.errors import CHOICE_COUNT, MODEL, PROMPT, BadRequest, ContextOverflow, ParamKey
from dragoman.limits import Limits
from dragoman.media import MediaKind, unsupported
from dragoman.types import Job

RunnerName: TypeAlias = Literal["auto", "llamacpp", "openvino", "torch"]
KVDtypeOption: TypeAlias = Literal["auto", "int8", "bf16", "f16"]
WeightKind: TypeAlias = Literal["auto", "int8", "fp8", "bf16"]


class LocalOptions(Struct, frozen=True, kw_only=True):
    """Options of the embedded engine; the defaults depend on the model and the machine."""

    runner: RunnerName = "auto"
    """Backend that computes. `auto` selects the faster one by a benchmark with this file on this machine."""
    readers: int | None = None
    """Expected concurrent answers, by which runner and weights are chosen; default `slots`, or one."""
    name: str | None = None
    """Public name of the model; default the file's name."""
    context: int | None = None
    """Maximum tokens of one sequence, prompt and answer together."""
    slots: int | None = None
    """Sequences computed at the same time."""
    threads: int | None = None
    """Compute threads; default one per physical core that this process may use."""
    batch: int = 512
    """Maximum tokens in one engine step, which bounds how long a step takes."""
    chunk: int = 128
    """Maximum prompt tokens in one engine step while other sequences decode."""
    pause: float = 0.13
    """Target seconds of a step with prefill beside answers; or 1.5 times the time of one without."""
    kv_memory: int | None = None
    """Bytes of the KV cache; default a quarter of the free memory, at most 2 GiB."""
    kv_cache: KVDtypeOption = "auto"
    """Type of the KV cache: `int8`, `bf16` or `f16` (llama.cpp's); `auto` is 16 bits where possible."""
    weights: WeightKind = "auto"
    """Type of layer weights in torch: `int8` or `fp8` (half the memory), or `bf16`, the default on a GPU."""
    deterministic: bool = False
    """Whether an answer must not depend on concurrent ones; an error where that is not supported."""
    guesses: int = 7
    """Maximum draft tokens per step, from repeated text; 0 turns them off."""
    draft: str | None = None
    """GGUF file of a smaller model with the same vocabulary, for speculative decoding."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters: public name to GGUF file."""
    mmproj: str | None = None
    """GGUF file with the projector of a model that takes images or audio."""
    limits: Limits | None = None
    """Limits for decoding images and audio; default the server's."""
    gpu_layers: int | None = None
    """Layers computed on a GPU by llama.cpp, if its build supports one; default all, 0 for none."""
    flash_attention: bool = True
    """Whether to use fused attention where the architecture supports it: faster on every machine measured."""

    @property
    def adapter_files(self) -> list[Path]:
        return [Path(file).expanduser() for file in self.adapters.values()]


class JobBounds(Protocol):
    """The capacity of a runner."""

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
        message = "Images and audio have no log probabilities; remove 'prompt_logprobs' and 'echo'."
        raise BadRequest(message, param=ParamKey("prompt_logprobs"))
    if job.n < 1:
        raise BadRequest("A job needs at least one answer; n must be at least 1.", param=CHOICE_COUNT)
    for name, _scale in job.adapters:
        if name not in bounds.adapters:
            known = ", ".join(sorted(bounds.adapters)) or "none"
            raise BadRequest(f"There is no adapter {name!r}; loaded: {known}.", param=MODEL)
    sampling = job.sampling
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        raise BadRequest("'allowed_token_ids' must not be empty.", param=ParamKey("allowed_token_ids"))
    check_ids(ParamKey("allowed_token_ids"), sampling.allowed_token_ids or (), bounds)
    check_ids(ParamKey("logit_bias"), tuple(sampling.logit_bias), bounds)
    check_ids(ParamKey("stop_token_ids"), tuple(sampling.stop_token_ids), bounds)
    check_ids(ParamKey("bad_words"), [token for word in sampling.bad_words for token in word], bounds)


def check_prompt(prompt: Sequence[int], bounds: JobBounds) -> None:
    if not prompt:
        raise BadRequest("The prompt is empty.", param=PROMPT)
    if len(prompt) >= bounds.context:
        raise ContextOverflow.of(len(prompt), bounds.context - 1)
    check_ids(PROMPT, prompt, bounds)


def check_ids(param: ParamKey, ids: Sequence[int], bounds: JobBounds) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < bounds.vocabulary):
        raise BadRequest(f"'{param}' has an id that is not in the vocabulary.", param=param)
