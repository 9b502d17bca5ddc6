"""Choosing for many rows at once, where the logits are: only ids, and what is asked of them, leave it.

It is what `sampler.py` does row by row in numpy, for answers that no rule of their own touches. The number
that decides comes from each answer's own generator, so seeds mean the same here.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from dragoman.types import Sampling, TokenLogprob

Chosen: TypeAlias = tuple[int, TokenLogprob | None]
Draw: TypeAlias = Callable[[torch.Tensor, Sequence[Sampling], Sequence[float]], torch.Tensor]


def at(rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The rows at these places, without a copy where it is all of them."""
    return rows if len(places) == rows.size(0) else rows[places]


def choose(
    rows: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float], draw: "Draw | None" = None
) -> list[Chosen]:
    """An id for each row, and its log probability where that is asked for. Temperature 0: the largest.

    Another `draw` may do the same, faster where the rows are.
    """
    ids = rows.argmax(dim=-1)
    drawn = [place for place, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        asked, numbers = [samplings[place] for place in drawn], [uniforms[place] for place in drawn]
        ids[drawn] = (draw or draw_rows)(at(rows, drawn), asked, numbers)
    told: dict[int, TokenLogprob] = {}
    reported = [place for place, sampling in enumerate(samplings) if sampling.logprobs is not None]
    if reported:
        tops = [samplings[place].logprobs or 0 for place in reported]
        told = dict(zip(reported, report(at(rows, reported), ids[reported], tops), strict=True))
    return [(id_, told.get(place)) for place, id_ in enumerate(ids.tolist())]


def draw_rows(rows: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> torch.Tensor:
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
