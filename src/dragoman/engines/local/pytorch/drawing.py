"""Choices from the rows of a step, where the logits are.

What is drawn is what `sampler.draw` draws: temperature, then min-p, top-k and top-p, and the id at which the
running sum of weights, in the order of ids, passes a part of the total that a uniform number names. All is
computed row by row, so it does not depend on others beside it. `kernels.draw` is the same on a GPU.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dragoman.engines.choosing.sampler import COLDEST
from dragoman.types import Sampling

_BITS = 31
"""Of a float that is not negative: as whole numbers they are in the same order."""


def as_rows(asked: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
    """Of each row: 1 / temperature, min-p, top-k, top-p, and the number that decides."""
    rows = [
        (1 / max(one.temperature, COLDEST), one.min_p, max(one.top_k, 0), one.top_p, uniform)
        for one, uniform in zip(asked, uniforms, strict=True)
    ]
    return torch.from_numpy(np.array(rows, np.float32))


def draw(logits: Tensor, asked: Tensor) -> Tensor:
    """An id for each row; -1 where nothing is left."""
    heat, min_p, top_k, top_p, uniform = asked.split(1, 1)
    peaks = logits.amax(-1, keepdim=True)
    weights = torch.exp((logits - peaks) * heat)
    weights = torch.where(weights >= min_p, weights, 0)
    counts = torch.where(top_k > 0, top_k, float("-inf"))
    weights = _keep(weights, (weights > 0).float(), counts)
    wanted = torch.where(top_p < 1, top_p * weights.sum(-1, keepdim=True), float("-inf"))
    weights = _keep(weights, weights, wanted)
    sums = weights.cumsum(-1)
    whole = sums[:, -1:].contiguous()
    # Rounding does not carry it past the last one that adds to the sum.
    last = torch.searchsorted(sums, whole)
    found = torch.minimum(torch.searchsorted(sums, uniform * whole, right=True), last)
    return torch.where(peaks > -torch.inf, found, -1)[:, 0]


def _keep(weights: Tensor, counted: Tensor, wanted: Tensor) -> Tensor:
    """The largest weights, as many as it takes for `counted` to reach what is wanted; equals are kept.

    Without sorting: the edge is found bit by bit, as the largest number for which what is above it is enough.
    """
    if bool((wanted == float("-inf")).all()):
        return weights
    bits = weights.view(torch.int32)
    edge = torch.zeros_like(wanted, dtype=torch.int32)
    for bit in range(_BITS - 1, -1, -1):
        higher = edge | (1 << bit)
        reached = torch.where(bits >= higher, counted, 0).sum(-1, keepdim=True)
        edge = torch.where(reached >= wanted, higher, edge)
    everything = wanted == float("-inf")
    return torch.where(everything | (bits >= edge), weights, 0)
