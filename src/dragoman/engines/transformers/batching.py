"""The library's continuous batching, with our own sampling.

Its scheduler, its paged cache and its thread do the work. Its own sampling is not used: it supports too few
parameters and no constraints. A logits processor of ours gets the logits of each step, samples the ids, and
returns rows in which they are the largest.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus, OutputRouter
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler
from transformers.generation.logits_process import LogitsProcessorList

from dragoman.engines.sampling.torch_sampler import at, choose
from dragoman.engines.transformers.engine import ContinuationStep, TransformersContinuation
from dragoman.types import Step

# The batches.


class Listener(Protocol):
    """Receives the results of each step from the library's thread."""

    def said(self, steps: list[ContinuationStep]) -> None: ...

    def failed(self, id: str) -> None: ...

    def ended(self) -> None:
        """The thread has ended, on request or by an error."""


GPU_BATCH = 4096
"""Ids of a step on a GPU, if the library must not decide."""


def why_not(text: Any) -> str | None:
    """Return a reason why a model does not support batching, or None; checked when the model is opened."""
    if getattr(text, "kv_lora_rank", None):
        return "MLA (compressed keys and values)"
    others = set(getattr(text, "layer_types", None) or ()) - set(ATTN_TYPE_TO_ALLOCATOR)
    return f"layers of the kind {min(others)}" if others else None


def make_manager(
    model: Any, listener: Listener, *, page: int, pages: int | None, batch: int, rows: int, longest: int
) -> tuple[Any, int]:
    """Create a manager that is not started yet, and return it with the minimum size of a prompt in a step.

    If `pages` is None, the library sizes them by the device's memory. `longest` ids, which must be in one
    step, always fit.
    """
    size = max(batch if pages is not None else GPU_BATCH, longest + rows)
    # Sampling needs the logits on the host between two steps, so asynchronous steps and CUDA graphs are off.
    config = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=pages,
        max_batch_tokens=size if pages is not None or longest else None,
        max_requests_per_batch=rows,
        use_async_batching=False,
        use_cuda_graph=False,
        # Flash attention takes no mask.
        auto_switch_to_flash=not longest,
        scheduler_type=WHOLE,
    )
    # cuDNN creates a plan for every new length, which takes longer than a step; and every step has another
    # length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    plain = GenerationConfig(do_sample=False, eos_token_id=-1)
    model._get_logits_processor = lambda _config: LogitsProcessorList([_SamplingProcessor(listener)])
    manager = model.init_continuous_batching(plain, config)
    # The list counts only processors that it has converted itself.
    manager.logit_processor.tensors_required = 1
    manager.output_router = _Router(listener)
    manager.background_thread_status = _Status(listener)
    return manager, size - rows


class _BlockAwareScheduler(FIFOScheduler):  # type: ignore[misc]
    """Scheduler that cuts a prompt if a step has no space for it, but never through a block with
    bidirectional attention.
    """

    def _schedule_request(
        self, state: Any, request_tokens: list[int], token_budget: int, removed: set[str]
    ) -> None:
        view = state.logit_processor_kwargs["run"].view
        if view is not None and token_budget < len(request_tokens):
            token_budget = view.whole(state.position_offset, token_budget)
        super()._schedule_request(state, request_tokens, token_budget, removed)


WHOLE = "dragoman"
SCHEDULER_MAPPING[WHOLE] = _BlockAwareScheduler


class _SamplingProcessor(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    supported_kwargs: ClassVar[dict[str, type]] = {"run": TransformersContinuation}
    ignored_kwargs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._runs: list[TransformersContinuation] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> torch.Tensor:
        """Remember the requests of the step, in the order of its rows; they need no tensor arguments."""
        self._runs = [request.state.logit_processor_kwargs["run"] for request in requests_with_new_token]
        return torch.zeros(len(self._runs), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        steps = self._steps(scores)
        chosen = torch.tensor([step.ids[-1] if step and step.ids else 0 for step in steps])
        self._listener.said([(run, step) for run, step in zip(self._runs, steps, strict=True) if step])
        return torch.zeros_like(scores).scatter_(1, chosen.to(scores.device).unsqueeze(1), 1.0)

    def _steps(self, scores: torch.Tensor) -> list[Step | None]:
        together: list[int] = []
        alone: list[int] = []
        for index, run in enumerate(self._runs):
            (together if run.in_company(scores.is_cuda) else alone).append(index)
        steps: list[Step | None] = [None] * len(self._runs)
        if together:
            runs = [self._runs[position] for position in together]
            samplings, uniforms = [run.sampling for run in runs], [run.uniform() for run in runs]
            for index, chosen in zip(
                together, choose(at(scores, together), samplings, uniforms), strict=True
            ):
                steps[index] = self._runs[index].take(*chosen)
        if alone:
            # Only rows that need the host leave the device.
            for index, row in zip(alone, scores[alone].cpu().numpy(), strict=True):
                steps[index] = self._runs[index].advance(row)
        return steps


class _Router(OutputRouter):  # type: ignore[misc]
    """Output router. Answers have left with their steps; only failed requests are reported here."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def deliver(self, output: Any) -> None:
        if output.error is not None:
            self._listener.failed(output.request_id)

    def deliver_batch(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.deliver(output)


class _Status(BackgroundThreadStatus):  # type: ignore[misc]
    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def mark_as_stopped(self) -> None:
        super().mark_as_stopped()
        self._listener.ended()


# Embeddings: the mean of the last hidden states.


def mean_vectors(model: Any, prompts: Iterable[Sequence[int]]) -> list[list[float]]:
    """Return one normalized vector per prompt, computed one at a time, because padding would change them."""
    with torch.no_grad():
        return [_vector(model.base_model, torch.tensor([list(ids)], device=model.device)) for ids in prompts]


def _vector(model: Any, ids: Any) -> list[float]:
    states = model(input_ids=ids).last_hidden_state[0].float()
    mean = states.mean(dim=0)
    vector: list[float] = (mean / mean.norm().clamp(min=1e-12)).tolist()
    return vector
