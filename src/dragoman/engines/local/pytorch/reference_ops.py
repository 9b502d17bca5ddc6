"""The batch of a step, and a layer's operations besides matrix products, in PyTorch's own operations: for
CPUs, and as the reference for kernels. `kernels.py` has the same functions for GPUs.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor


class StepBatch(Struct):
    """The rows of a step, in chunks of one sequence each. A row of an answer is a chunk of its own, and so
    is a draft token: all keys and values are in their pages before attention begins.
    """

    all: Tensor
    """The memory that the other tensors of 32-bit numbers are views of."""
    chosen: Tensor
    """The ids that were sampled last."""
    ids: Tensor
    """Ids; below zero, `~place` refers to the id that was sampled at that index."""
    positions: Tensor
    tables: Tensor
    """Pages of each chunk."""
    pieces: Tensor
    """Chunk number of each row."""
    begins: Tensor
    """First row of each chunk, and the end of the last."""
    blocks: Tensor
    """Blocks of prompt attention: the number of the chunk, and the block's first row in it."""
    answers: Tensor
    """The same for rows of answers, each of which is a chunk and a block."""
    shares: Tensor | None = None
    """Scale of each adapter for each row; None if no row has one."""


def norm(states: Tensor, weight: Tensor, epsilon: float, from_one: bool) -> Tensor:
    wide = states.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    scale = weight.float() + 1 if from_one else weight.float()
    return (wide * scale).to(states.dtype)


def add_norm(
    states: Tensor, more: Tensor, weight: Tensor, epsilon: float, from_one: bool
) -> tuple[Tensor, Tensor]:
    """Add both; return the sum and its norm."""
    added = states + more
    return added, norm(added, weight, epsilon, from_one)


def gate(raised: Tensor, gelu: bool) -> Tensor:
    """Multiply the second half with the activation of the first."""
    first, second = raised.chunk(2, -1)
    return (F.gelu(first, approximate="tanh") if gelu else F.silu(first)) * second


def rotate_and_keep(
    joined: Tensor, keys: Tensor, values: Tensor, waves: Tensor, batch: StepBatch, heads: int, norms: "Norms"
) -> Tensor:
    """Rotate queries and keys, and write keys and values to their pages; returns the queries.

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
    indices = _places(batch, keys.shape[1])
    keys.view(-1, kv_heads, head)[indices] = _rotate(key, cosines, sines)
    values.view(-1, kv_heads, head)[indices] = value
    return _rotate(query, cosines, sines)


Norms = tuple[Tensor, Tensor, float, bool] | None
"""Weights for queries and for keys, epsilon, and whether the weights are differences from 1."""


def _rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = states.float().chunk(2, -1)
    cosines, sines = cosines[:, None], sines[:, None]
    turned = torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)
    return turned.to(states.dtype)


def _places(batch: StepBatch, page: int) -> Tensor:
    """Return each row's index in the pages, counted contiguously."""
    pages = batch.tables[batch.pieces.long(), (batch.positions // page).long()]
    return pages.long() * page + batch.positions % page


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, batch: StepBatch, scale: float, window: int
) -> Tensor:
    """Compute attention: each row attends to the pages of its chunk up to its own position."""
    result = torch.empty_like(queries)
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
        # One row at a time with only what it attends to, so that its bits do not depend on others.
        for row, end_of_row in enumerate(ends, start):
            seen = slice(max(0, end_of_row - window) if window else 0, end_of_row)
            scores = torch.einsum("hd,lhd->hl", queries[row].float(), key[seen]) * scale
            result[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), value[seen]).to(result.dtype)
    return result
