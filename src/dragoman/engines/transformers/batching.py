"""The library's continuous batching, with our hand on the logits.

Its scheduler, its paged cache and its thread do the work. Of its own sampling nothing is used: it knows too
few of the parameters and no constraints. A processor of ours sees the logits of each step, chooses the ids,
and leaves rows in which they are the largest.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus, OutputRouter
from transformers.generation.logits_process import LogitsProcessorList

from dragoman.engines.transformers.engine import Run, Said
from dragoman.types import Sampling, Step, TokenLogprob

# Choosing for many rows at once, where the logits are: only ids, and what is asked of them, leave it. It is
# what `choosing/sampler.py` does row by row in numpy, for answers that no rule of their own touches. The
# number that decides comes from each answer's own generator, so seeds mean the same here.


Chosen: TypeAlias = tuple[int, TokenLogprob | None]


def at(rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The rows at these places, without a copy where it is all of them."""
    return rows if len(places) == rows.size(0) else rows[places]


def choose(rows: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> list[Chosen]:
    """An id for each row, and its log probability where that is asked for. Temperature 0: the largest."""
    ids = rows.argmax(dim=-1)
    drawn = [place for place, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        asked, numbers = [samplings[place] for place in drawn], [uniforms[place] for place in drawn]
        ids[drawn] = draw(at(rows, drawn), asked, numbers)
    told: dict[int, TokenLogprob] = {}
    reported = [place for place, sampling in enumerate(samplings) if sampling.logprobs is not None]
    if reported:
        tops = [samplings[place].logprobs or 0 for place in reported]
        told = dict(zip(reported, report(at(rows, reported), ids[reported], tops), strict=True))
    return [(id_, told.get(place)) for place, id_ in enumerate(ids.tolist())]


def draw(rows: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> torch.Tensor:
    """An id for each row by temperature and filters; a number in [0, 1) decides which."""

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=rows.device).unsqueeze(1)

    weights = rows / column([sampling.temperature for sampling in samplings])
    weights = weights.sub_(weights.amax(dim=-1, keepdim=True)).exp_()
    if any(sampling.min_p > 0 for sampling in samplings):
        weights[weights < column([sampling.min_p for sampling in samplings])] = 0
    if any(0 < sampling.top_k < rows.size(1) for sampling in samplings):
        weights = _largest(weights, [sampling.top_k for sampling in samplings])
    if any(sampling.top_p < 1 for sampling in samplings):
        weights = _nucleus(weights, column([sampling.top_p for sampling in samplings]))
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1:]
    # Below the total, so that the place found has a weight, whatever is rounded.
    target = torch.minimum(column(uniforms, torch.float64) * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True).squeeze(1).clamp_(max=rows.size(1) - 1)


def report(rows: torch.Tensor, ids: torch.Tensor, tops: Sequence[int]) -> list[TokenLogprob]:
    """The log probability of each row's id, and so many of the most likely ids with theirs."""
    base = rows.logsumexp(dim=-1, keepdim=True)
    own = (rows.gather(1, ids.unsqueeze(1)) - base).squeeze(1).tolist()
    values, places = rows.topk(min(max(tops), rows.size(1)), dim=-1)
    told = []
    for id_, logprob, top, likely, theirs in zip(
        ids.tolist(), own, tops, places.tolist(), (values - base).tolist(), strict=True
    ):
        # Equal ones are put in the order of their ids, so that the answer does not depend on the device.
        ranked = sorted(zip(theirs[:top], likely[:top], strict=True), key=lambda pair: (-pair[0], pair[1]))
        told.append(TokenLogprob(id_, logprob, tuple((likely_id, value) for value, likely_id in ranked)))
    return told


def _largest(weights: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Only so many of the largest are left in each row; a count of 0 leaves all."""
    size = weights.size(1)
    limits = [min(count, size) if count > 0 else size for count in counts]
    most = max(limit for limit in limits if limit < size)
    values, places = weights.topk(most, dim=-1)
    limit = torch.tensor(limits, device=weights.device).unsqueeze(1)
    values[torch.arange(most, device=weights.device) >= limit] = 0
    kept = torch.zeros_like(weights).scatter_(1, places, values)
    return torch.where(limit < size, kept, weights)


def _nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The fewest largest weights that make up `top_p` of the sum; equals are kept together."""
    descending = weights.sort(dim=-1, descending=True).values
    reached = descending.cumsum(dim=-1, dtype=torch.float64)
    last = torch.searchsorted(reached, top_p * reached[:, -1:]).clamp_(max=weights.size(1) - 1)
    # A row that asks for all of it keeps what is too small to change the sum, as it would alone.
    return torch.where((weights >= descending.gather(1, last)) | (top_p >= 1), weights, 0)


# The batches.


class Listener(Protocol):
    """Whom the library's thread tells what came of a step."""

    def said(self, steps: list[Said]) -> None: ...

    def failed(self, id: str) -> None: ...

    def ended(self) -> None:
        """The thread has come to its end, by order or by an error."""


def make_manager(
    model: Any, listener: Listener, *, page: int, pages: int | None, batch: int | None, rows: int
) -> Any:
    """A manager that is not started yet. `pages` and `batch` of None are found from the device's memory."""
    # Choosing needs the logits on the host between two steps, so nothing may run ahead or be captured.
    config = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=pages,
        max_batch_tokens=batch,
        max_requests_per_batch=rows,
        use_async_batching=False,
        use_cuda_graph=False,
    )
    # cuDNN makes a plan for every length that it has not seen, which takes longer than a step; and every step
    # has another length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    plain = GenerationConfig(do_sample=False, eos_token_id=-1)
    model._get_logits_processor = lambda _config: LogitsProcessorList([_Chooser(listener)])
    manager = model.init_continuous_batching(plain, config)
    # The list counts only processors that it has converted itself.
    manager.logit_processor.tensors_required = 1
    manager.output_router = _Router(listener)
    manager.background_thread_status = _Status(listener)
    return manager


class _Chooser(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    supported_kwargs: ClassVar[dict[str, type]] = {"run": Run}
    ignored_kwargs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._runs: list[Run] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> torch.Tensor:
        """Told who is in the step, in the order of the rows; there is no number to remember of them."""
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
        for place, run in enumerate(self._runs):
            (together if run.in_company(scores.is_cuda) else alone).append(place)
        steps: list[Step | None] = [None] * len(self._runs)
        if together:
            runs = [self._runs[place] for place in together]
            samplings, uniforms = [run.sampling for run in runs], [run.uniform() for run in runs]
            for place, chosen in zip(
                together, choose(at(scores, together), samplings, uniforms), strict=True
            ):
                steps[place] = self._runs[place].take(*chosen)
        if alone:
            # Only rows that somebody must look at leave the device.
            for place, row in zip(alone, scores[alone].cpu().numpy(), strict=True):
                steps[place] = self._runs[place].advance(row)
        return steps


class _Router(OutputRouter):  # type: ignore[misc]
    """Answers have left with their steps; what is still to be told is which requests have failed."""

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
