"""A layer's operations besides matrix products, as Triton kernels: the same functions as in
`reference_ops.py`.

Attention is one kernel for prompts and answers. A program has some rows of one chunk and the heads that share
a head of keys and values, and goes through the pages of the chunk from the first to the last. So what a row
adds up, and in which order, depends on its own sequence alone: neither on the number of rows beside it, nor
on their lengths. The number of rows per program differs between chunks of prompts and rows of answers, which
is why the keys and values of an answer differ from those of a prompt.
"""

# Kernels are a language of their own with Python's syntax: their arguments are pointers and constants.
# mypy: disable-error-code="no-untyped-def, no-any-return"

from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dragoman.engines.local.pytorch.reference_ops import Norms, StepBatch
from dragoman.engines.sampling.torch_sampler import put
from dragoman.types import Sampling

PROMPT_ROWS = 64
"""Rows of a prompt in a program, times the heads that share keys."""
_TILE = 64


@triton.jit
def _norm_kernel(
    states, more, weight, added, normed, width, epsilon, FROM_ONE: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    index = row * width + column
    value = tl.load(states + index, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(more + index, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(added.dtype.element_ty)
        tl.store(added + index, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if FROM_ONE:
        scale += 1.0
    mean = tl.sum(value * value, 0) / width
    tl.store(
        normed + index, (value * tl.rsqrt(mean + epsilon) * scale).to(normed.dtype.element_ty), mask=inside
    )


def norm(states: Tensor, weight: Tensor, epsilon: float, from_one: bool) -> Tensor:
    return add_norm(states, None, weight, epsilon, from_one)[1]


def add_norm(
    states: Tensor, more: Tensor | None, weight: Tensor, epsilon: float, from_one: bool
) -> tuple[Tensor, Tensor]:
    adds, normed = more is not None, torch.empty_like(states)
    added = torch.empty_like(states) if adds else states
    rows, width = states.shape
    block = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        states, more if adds else states, weight, added, normed, width, epsilon, from_one, adds, block
    )
    return added, normed


@triton.jit
def _gate_kernel(raised, opened, inner, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    first = tl.load(raised + row * 2 * inner + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(raised + row * 2 * inner + inner + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        bent = 0.7978845608028654 * (first + 0.044715 * first * first * first)
        value = first * tl.sigmoid(2 * bent)
    else:
        value = first * tl.sigmoid(first)
    value = value.to(opened.dtype.element_ty).to(tl.float32) * second
    tl.store(opened + row * inner + column, value.to(opened.dtype.element_ty), mask=inside)


def gate(raised: Tensor, gelu: bool) -> Tensor:
    rows, inner = raised.shape[0], raised.shape[1] // 2
    opened = raised.new_empty(rows, inner)
    _gate_kernel[(rows, triton.cdiv(inner, 1024))](raised, opened, inner, gelu, 1024)
    return opened


@triton.jit
def _keep_kernel(
    joined, queries, keys, values, waves, positions, pieces, tables, table_width, query_norm, key_norm,
    epsilon, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    NORMS: tl.constexpr, FROM_ONE: tl.constexpr,
):  # fmt: skip
    row, number = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, HALF)
    start = joined + (row * (HEADS + 2 * KV_HEADS) + number) * 2 * HALF
    position = tl.load(positions + row)
    first, second = tl.load(start + half), tl.load(start + HALF + half)
    if number < HEADS + KV_HEADS:
        low, high = first.to(tl.float32), second.to(tl.float32)
        if NORMS:
            weight = query_norm if number < HEADS else key_norm
            mean = (tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF)
            factor = tl.rsqrt(mean + epsilon)
            low_scale = tl.load(weight + half).to(tl.float32)
            high_scale = tl.load(weight + HALF + half).to(tl.float32)
            if FROM_ONE:
                low_scale += 1.0
                high_scale += 1.0
            low = (low * factor * low_scale).to(first.dtype).to(tl.float32)
            high = (high * factor * high_scale).to(first.dtype).to(tl.float32)
        cosine = tl.load(waves + position * 2 * HALF + half)
        sine = tl.load(waves + position * 2 * HALF + HALF + half)
        first = (low * cosine - high * sine).to(first.dtype)
        second = (high * cosine + low * sine).to(second.dtype)
    if number < HEADS:
        target = queries + (row * HEADS + number) * 2 * HALF
    else:
        page = tl.load(tables + tl.load(pieces + row) * table_width + position // PAGE).to(tl.int64)
        index = page * PAGE + position % PAGE
        if number < HEADS + KV_HEADS:
            target = keys + (index * KV_HEADS + number - HEADS) * 2 * HALF
        else:
            target = values + (index * KV_HEADS + number - HEADS - KV_HEADS) * 2 * HALF
    tl.store(target + half, first)
    tl.store(target + HALF + half, second)


def rotate_and_keep(
    joined: Tensor, keys: Tensor, values: Tensor, waves: Tensor, batch: StepBatch, heads: int, norms: Norms
) -> Tensor:
    page, kv_heads, head = keys.shape[1:]
    rows = len(joined)
    queries = joined.new_empty(rows, heads, head)
    weights: tuple[Any, Any, float, bool] = norms or (waves, waves, 0.0, False)
    _keep_kernel[(rows, heads + 2 * kv_heads)](
        joined,
        queries,
        keys,
        values,
        waves,
        batch.positions,
        batch.pieces,
        batch.tables,
        batch.tables.stride(0),
        weights[0],
        weights[1],
        weights[2],
        heads,
        kv_heads,
        head // 2,
        page,
        norms is not None,
        weights[3],
        num_warps=1,
    )
    return queries


@triton.jit
def _attend_kernel(
    outcome, queries, keys, values, positions, begins, tables, table_width, blocks, scale, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr,
    LINES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    SHARED: tl.constexpr = HEADS // KV_HEADS
    block, kv_head = tl.program_id(0), tl.program_id(1)
    piece, first = tl.load(blocks + 2 * block), tl.load(blocks + 2 * block + 1)
    start, end = tl.load(begins + piece), tl.load(begins + piece + 1)
    line, number = tl.arange(0, LINES), tl.arange(0, HEAD)
    row = start + first + line // SHARED
    inside = (row < end) & (line < (LINES // SHARED) * SHARED)
    index = (row * HEADS + kv_head * SHARED + line % SHARED)[:, None] * HEAD + number[None]
    query = tl.load(queries + index, mask=inside[:, None], other=0.0)
    position = tl.load(positions + row, mask=inside, other=-1)
    last = tl.max(position, 0)
    earliest = tl.load(positions + start + first)
    begin = 0
    if window > 0:
        begin = tl.maximum(0, earliest - window + 1) // TILE * TILE
    most = tl.full([LINES], -1e30, tl.float32)
    total = tl.zeros([LINES], tl.float32)
    sums = tl.zeros([LINES, HEAD], tl.float32)
    for tile in range(begin, last + 1, TILE):
        token = tile + tl.arange(0, TILE)
        known = token <= last
        page = tl.load(tables + piece * table_width + token // PAGE, mask=known, other=0).to(tl.int64)
        where = ((page * PAGE + token % PAGE) * KV_HEADS + kv_head) * HEAD
        key = tl.load(keys + where[None] + number[:, None], mask=known[None], other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        seen = token[None] <= position[:, None]
        if window > 0:
            seen &= position[:, None] - token[None] < window
        score = tl.where(seen, score, -1e30)
        larger = tl.maximum(most, tl.max(score, 1))
        weight = tl.where(seen, tl.exp(score - larger[:, None]), 0.0)
        shrunk = tl.exp(most - larger)
        total = total * shrunk + tl.sum(weight, 1)
        value = tl.load(values + where[:, None] + number[None], mask=known[:, None], other=0.0)
        sums = sums * shrunk[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        most = larger
    result = sums / tl.maximum(total, 1e-30)[:, None]
    tl.store(outcome + index, result.to(outcome.dtype.element_ty), mask=inside[:, None])


def lines_of(single: bool, shared: int) -> int:
    """Return the lines of a program: rows, times the heads that share keys. A product on the GPU has at
    least 16.
    """
    return max(16 if single else PROMPT_ROWS, triton.next_power_of_2(shared))


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, batch: StepBatch, scale: float, window: int
) -> Tensor:
    result = torch.empty_like(queries)
    page, kv_heads, head = keys.shape[1:]
    heads = queries.shape[1]
    # Each kind always uses the same kernel, whether or not there are rows of the other.
    for blocks, single in ((batch.blocks, False), (batch.answers, True)):
        if not len(blocks):
            continue
        _attend_kernel[(len(blocks), kv_heads)](
            result,
            queries,
            keys,
            values,
            batch.positions,
            batch.begins,
            batch.tables,
            batch.tables.stride(0),
            blocks,
            scale,
            window,
            heads,
            kv_heads,
            head,
            page,
            lines_of(single, heads // kv_heads),
            _TILE,
            num_warps=4,
            num_stages=2,
        )
    return result


# Sampling from rows of logits. A program has one row, and reads it about a dozen times. The thresholds of
# top-k and top-p are found three bits at a time: relative probabilities are between 0 and 1, so their bits as
# integers have the same order, and the two highest bits are 0.


@triton.jit
def _weights(logits, start, size, peak, heat, floor, WIDE: tl.constexpr):
    """Return the probabilities of the next ids relative to the likeliest; 0 below the floor."""
    column = start + tl.arange(0, WIDE)
    weight = tl.exp((tl.load(logits + column, mask=column < size, other=float("-inf")) - peak) * heat)
    return tl.where(weight >= floor, weight, 0.0)


@triton.jit
def _peak(logits, size, WIDE: tl.constexpr):
    highest = tl.full([WIDE], float("-inf"), tl.float32)
    for start in range(0, size, WIDE):
        column = start + tl.arange(0, WIDE)
        highest = tl.maximum(highest, tl.load(logits + column, mask=column < size, other=float("-inf")))
    return tl.max(highest, 0)


@triton.jit
def _enough(sums, goal, number: tl.constexpr, enough, reached):
    result = tl.sum(sums, 0)
    return tl.where(result >= goal, number, enough), tl.where(result >= goal, result, reached)


@triton.jit
def _edge(logits, size, peak, heat, floor, wanted, BY_WEIGHT: tl.constexpr, WIDE: tl.constexpr):
    """Return the largest threshold at which the weights not below it add up to `wanted`, and that sum. By
    weight, `wanted` is a fraction of the total; otherwise it is a count.
    """
    # As one tile of eight sums by the width this would be shorter, but take up to a third longer.
    edge = tl.full([], 0, tl.int32)
    reached = tl.full([], 0.0, tl.float32)
    goal = wanted
    for level in range(10):
        step = 1 << (27 - 3 * level)
        every = tl.zeros([WIDE], tl.float32)
        one = tl.zeros([WIDE], tl.float32)
        two = tl.zeros([WIDE], tl.float32)
        three = tl.zeros([WIDE], tl.float32)
        four = tl.zeros([WIDE], tl.float32)
        five = tl.zeros([WIDE], tl.float32)
        six = tl.zeros([WIDE], tl.float32)
        seven = tl.zeros([WIDE], tl.float32)
        for start in range(0, size, WIDE):
            weight = _weights(logits, start, size, peak, heat, floor, WIDE)
            counted = weight if BY_WEIGHT else (weight > 0).to(tl.float32)
            bits = weight.to(tl.int32, bitcast=True) - edge
            every += tl.where(bits >= 0, counted, 0.0)
            one += tl.where(bits >= step, counted, 0.0)
            two += tl.where(bits >= 2 * step, counted, 0.0)
            three += tl.where(bits >= 3 * step, counted, 0.0)
            four += tl.where(bits >= 4 * step, counted, 0.0)
            five += tl.where(bits >= 5 * step, counted, 0.0)
            six += tl.where(bits >= 6 * step, counted, 0.0)
            seven += tl.where(bits >= 7 * step, counted, 0.0)
        # The sum of the first round is the total.
        added = tl.sum(every, 0)
        reached = tl.where(level == 0, added, reached)
        if BY_WEIGHT:
            goal = tl.where(level == 0, wanted * added, goal)
        # The sums decrease, so the last one that is enough counts.
        enough = tl.full([], 0, tl.int32)
        enough, reached = _enough(one, goal, 1, enough, reached)
        enough, reached = _enough(two, goal, 2, enough, reached)
        enough, reached = _enough(three, goal, 3, enough, reached)
        enough, reached = _enough(four, goal, 4, enough, reached)
        enough, reached = _enough(five, goal, 5, enough, reached)
        enough, reached = _enough(six, goal, 6, enough, reached)
        enough, reached = _enough(seven, goal, 7, enough, reached)
        edge += enough * step
    return edge, reached


@triton.jit
def _draw_kernel(logits, result, asked, uniforms, size, row_stride, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    heat, min_p = tl.load(asked + 4 * row), tl.load(asked + 4 * row + 1)
    top_k, top_p = tl.load(asked + 4 * row + 2), tl.load(asked + 4 * row + 3)
    uniform = tl.load(uniforms + row)
    peak = _peak(logits, size, WIDE)
    floor = min_p
    if top_k > 0:
        edge, _ = _edge(logits, size, peak, heat, floor, top_k, False, WIDE)
        floor = tl.maximum(floor, edge.to(tl.float32, bitcast=True))
    whole = tl.full([], 0.0, tl.float32)
    if top_p < 1:
        edge, whole = _edge(logits, size, peak, heat, floor, top_p, True, WIDE)
        floor = tl.maximum(floor, edge.to(tl.float32, bitcast=True))
    else:
        for start in range(0, size, WIDE):
            whole += tl.sum(_weights(logits, start, size, peak, heat, floor, WIDE), 0)
    # Find the block in which the running sum passes its share of the total.
    target, reached, before = uniform * whole, tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    index, last = tl.full([], -1, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, size, WIDE):
        more = tl.sum(_weights(logits, start, size, peak, heat, floor, WIDE), 0)
        if more > 0:
            last = start
        if (index < 0) & (reached + more > target):
            index, before = start, reached
        reached += more
    if index < 0:
        # Rounding must not carry it past the last block that adds to the sum.
        index, before = last, float("-inf")
    column = index + tl.arange(0, WIDE)
    weight = _weights(logits, index, size, peak, heat, floor, WIDE)
    passed = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
    first = tl.min(tl.where(passed, column, 2147483647), 0)
    final = tl.max(tl.where(weight > 0, column, -1), 0)
    chosen = tl.where(first < 2147483647, first, final)
    tl.store(result + row, chosen)


@triton.jit
def _total_kernel(logits, result, size, row_stride, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    peak = _peak(logits, size, WIDE)
    sums = tl.zeros([WIDE], tl.float32)
    for start in range(0, size, WIDE):
        sums += _weights(logits, start, size, peak, 1.0, 0.0, WIDE)
    tl.store(result + row, peak + tl.log(tl.sum(sums, 0)))


class GpuDrawKernel:
    """Sampling kernel for GPUs: the results of `torch_sampler.draw_rows`, except where rounding decides. The
    parameters stay on the GPU while the same samplings follow.
    """

    def __init__(self) -> None:
        self._samplings: Sequence[Sampling] = ()
        self._asked: Tensor | None = None

    def __call__(self, rows: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
        same = len(samplings) == len(self._samplings) and all(map(is_, samplings, self._samplings))
        if self._asked is None or not same:
            items = [(1 / one.temperature, one.min_p, max(one.top_k, 0), one.top_p) for one in samplings]
            self._samplings, self._asked = samplings, put(np.array(items, np.float32), rows.device)
        result = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
        decide = put(np.array(uniforms, np.float32), rows.device)
        _draw_kernel[(len(rows),)](
            rows, result, self._asked, decide, rows.shape[1], rows.stride(0), 2048, num_warps=8
        )
        return result

    def total(self, rows: Tensor) -> Tensor:
        result = torch.empty(len(rows), 1, device=rows.device)
        _total_kernel[(len(rows),)](rows, result, rows.shape[1], rows.stride(0), 2048, num_warps=8)
        return result
