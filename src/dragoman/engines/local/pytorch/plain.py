"""The rows of a step, and what a layer computes of them beside its products, in PyTorch's own operations: for
CPUs, and as what kernels are compared with. `kernels.py` has the same functions for GPUs."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor


class StepBatch(Struct):
    """Rows are in pieces, each of one sequence. A row of an answer is a piece of its own, and so is a guess:
    all keys and values are in their pages before anything looks at them."""

    all: Tensor
    """The memory of the others, which are numbers of 32 bits."""
    chosen: Tensor
    """The ids that were chosen last."""
    ids: Tensor
    """Below zero, `~place`: the id that was chosen at that place."""
    positions: Tensor
    tables: Tensor
    """Of each piece, its pages."""
    pieces: Tensor
    """Of each row, the number of its piece."""
    begins: Tensor
    """Where each piece begins, and the last one ends."""
    blocks: Tensor
    """Of each piece of work that attention to prompts is cut into: the number of the piece, and its first row
    there."""
    answers: Tensor
    """The same of rows of answers, each of which is a piece and a block."""
    shares: Tensor | None = None
    """How much of each adapter a row has; None where nobody has one."""


def norm(states: Tensor, weight: Tensor, epsilon: float, from_one: bool) -> Tensor:
    wide = states.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    scale = weight.float() + 1 if from_one else weight.float()
    return (wide * scale).to(states.dtype)


def add_norm(
    states: Tensor, more: Tensor, weight: Tensor, epsilon: float, from_one: bool
) -> tuple[Tensor, Tensor]:
    """Both added, and that normed."""
    added = states + more
    return added, norm(added, weight, epsilon, from_one)


def gate(raised: Tensor, gelu: bool) -> Tensor:
    """The first half opens the second."""
    first, second = raised.chunk(2, -1)
    return (F.gelu(first, approximate="tanh") if gelu else F.silu(first)) * second


def rotate_and_keep(
    joined: Tensor, keys: Tensor, values: Tensor, waves: Tensor, batch: StepBatch, heads: int, norms: "Norms"
) -> Tensor:
    """Queries, rotated; keys, rotated too, and values are put in their pages.

    `joined` has queries, keys and values of each row; `waves` cosines and sines by position.
    """
    kv_heads, head = keys.shape[2], keys.shape[3]
    query, key, value = joined.view(len(joined), heads + 2 * kv_heads, head).split(
        [heads, kv_heads, kv_heads], 1
    )
    if norms is not None:
        query_norm, key_norm, epsilon, from_one = norms
        query, key = norm(query, query_norm, epsilon, from_one), norm(key, key_norm, epsilon, from_one)
    cosines, sines = waves[batch.positions.long()].chunk(2, -1)
    places = _places(batch, keys.shape[1])
    keys.view(-1, kv_heads, head)[places] = _rotate(key, cosines, sines)
    values.view(-1, kv_heads, head)[places] = value
    return _rotate(query, cosines, sines)


Norms = tuple[Tensor, Tensor, float, bool] | None
"""Weights for queries and for keys, epsilon, and whether they count from one."""


def _rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = states.float().chunk(2, -1)
    cosines, sines = cosines[:, None], sines[:, None]
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)
    return turned.to(states.dtype)


def _places(batch: StepBatch, page: int) -> Tensor:
    """Of each row, in the pages one behind the other."""
    pages = batch.tables[batch.pieces.long(), (batch.positions // page).long()]
    return pages.long() * page + batch.positions % page


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, batch: StepBatch, scale: float, window: int
) -> Tensor:
    """Each row sees what is in the pages of its piece up to its own position."""
    found = torch.empty_like(queries)
    page, kv_heads, head = keys.shape[1:]
    shared = queries.shape[1] // kv_heads
    begins = batch.begins.tolist()
    for number, (start, end) in enumerate(pairwise(begins)):
        if start == end:
            continue
        ends = (batch.positions[start:end] + 1).tolist()
        pages = batch.tables[number, : -(-ends[-1] // page)].long()
        key = keys[pages].view(-1, kv_heads, head).repeat_interleave(shared, 1).float()
        value = values[pages].view(-1, kv_heads, head).repeat_interleave(shared, 1).float()
        # One row at a time and what it sees alone, so that its bits do not depend on others.
        for row, end_of_row in enumerate(ends, start):
            seen = slice(max(0, end_of_row - window) if window else 0, end_of_row)
            scores = torch.einsum("hd,lhd->hl", queries[row].float(), key[seen]) * scale
            found[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), value[seen]).to(found.dtype)
    return found
