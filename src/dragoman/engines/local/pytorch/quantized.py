"""8-bit matrices: int8, or fp8 (e4m3). Each row has a scale that maps its largest number to the type's
largest.

A row's bits depend only on that row, so a part of a matrix can be changed separately, with the same result as
if all had been loaded.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class QuantizedMatrix:
    """A quantized matrix, used like a tensor of [..., outputs, inputs]."""

    __slots__ = ("numbers", "scales")

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        self.numbers = numbers
        self.scales = scales
        """[..., outputs, 1], in float32."""

    @property
    def shape(self) -> Sequence[int]:
        numbers: Sequence[int] = self.numbers.shape
        return numbers

    def __getitem__(self, which: Any) -> "QuantizedMatrix":
        """Return some of its rows, or one of its experts."""
        return QuantizedMatrix(self.numbers[which], self.scales[which])

    def split(self, sizes: list[int]) -> "list[QuantizedMatrix]":
        pairs = zip(self.numbers.split(sizes), self.scales.split(sizes), strict=True)
        return [QuantizedMatrix(*pair) for pair in pairs]

    def copy_(self, values: Tensor) -> None:
        """Quantize values into this matrix, rounding to nearest."""
        wide = values.to(self.numbers.device, torch.float32)
        largest = _LARGEST[self.numbers.dtype]
        scales = wide.abs().amax(-1, keepdim=True) / largest
        scales[scales == 0] = 1.0
        wide = (wide / scales).clamp_(-largest, largest)
        self.numbers.copy_(wide.round_() if self.numbers.dtype == torch.int8 else wide)
        self.scales.copy_(scales)

    def widen(self, dtype: torch.dtype) -> Tensor:
        return (self.numbers.float() * self.scales).to(dtype)


Matrix: TypeAlias = Tensor | QuantizedMatrix


def multiply(states: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Multiply as `F.linear` does."""
    if not isinstance(weight, QuantizedMatrix):
        return F.linear(states, weight, bias)
    if not states.is_cuda:
        return F.linear(states, weight.widen(states.dtype), bias)
    from dragoman.engines.local.pytorch.quantized_kernels import multiply_fp8, multiply_int8

    if weight.numbers.dtype == torch.int8:
        return multiply_int8(states, weight, bias)
    return multiply_fp8(states, weight, bias)
