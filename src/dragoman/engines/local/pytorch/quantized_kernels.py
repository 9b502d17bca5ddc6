"""Products with 8-bit matrices on a GPU.

With int8 only the weights are rounded: they are dequantized inside the product, whose time for few rows is
that of reading them. For many rows it is faster to dequantize the whole matrix first. With fp8 the states are
rounded too, each row with its own scale, since the GPU's product takes both in fp8: it is faster for any
number of rows, and less exact.
"""

# Kernels are a language of their own with Python's syntax: their arguments are pointers and constants.
# mypy: disable-error-code="no-untyped-def, no-any-return"

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dragoman.engines.local.pytorch.quantized import QuantizedMatrix

_MANY = 256
"""Rows above which the matrix is dequantized first."""
_FP8_GRAIN = 16
"""The GPU's fp8 product needs matrix sides that are multiples of this."""


@triton.jit
def _int8_kernel(
    states, numbers, scales, bias, result, rows, outputs, width, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = row < rows, output < outputs
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, width, WIDTH):
        column = start + tl.arange(0, WIDTH)
        inside = column < width
        left = tl.load(
            states + row[:, None] * width + column[None], mask=is_row[:, None] & inside[None], other=0.0
        )
        right = tl.load(
            numbers + output[None].to(tl.int64) * width + column[:, None],
            mask=is_output[None] & inside[:, None],
            other=0,
        )
        total += tl.dot(left, right.to(left.dtype))
    total *= tl.load(scales + output, mask=is_output, other=0.0)[None]
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None]
    index = row[:, None].to(tl.int64) * outputs + output[None]
    tl.store(result + index, total.to(result.dtype.element_ty), mask=is_row[:, None] & is_output[None])


def multiply_int8(states: Tensor, weight: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    rows, (outputs, width) = len(states), weight.shape
    if rows > _MANY:
        return F.linear(states, weight.widen(states.dtype), bias)
    states = states.contiguous()
    empty = states.new_empty(rows, outputs)
    if not rows:
        return empty
    # Few rows need many programs, which read at the same time; many rows large tiles, which read less often.
    tile, columns, depth, warps = (16, 32, 128, 4) if rows <= 16 else (64, 64, 64, 4)
    if rows > 64:
        tile, columns, warps = 128, 128, 8
    _int8_kernel[triton.cdiv(outputs, columns), triton.cdiv(rows, tile)](
        states, weight.numbers, weight.scales, states if bias is None else bias, empty, rows, outputs, width,
        bias is not None, tile, columns, depth, num_warps=warps, num_stages=4,
    )  # fmt: skip
    return empty


@triton.jit
def _to_fp8_kernel(states, numbers, scales, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(states + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0) / LARGEST, 1e-12)
    value = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
    tl.store(numbers + row * width + column, value.to(numbers.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def multiply_fp8(states: Tensor, weight: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    rows, (outputs, width) = len(states), weight.shape
    if outputs % _FP8_GRAIN or width % _FP8_GRAIN or not rows:
        return F.linear(states, weight.widen(states.dtype), bias)
    states = states.contiguous()
    numbers = torch.empty_like(states, dtype=torch.float8_e4m3fn)
    scales = states.new_empty(rows, 1, dtype=torch.float32)
    largest, block = 448.0, triton.next_power_of_2(width)
    _to_fp8_kernel[(rows,)](states, numbers, scales, width, largest, block, num_warps=8)
    result = torch._scaled_mm(
        numbers,
        weight.numbers.t(),
        scale_a=scales,
        scale_b=weight.scales.t(),
        out_dtype=states.dtype,
        use_fast_accum=True,
    )
    return result if bias is None else result + bias
