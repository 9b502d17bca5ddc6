"""The forward pass: rows of ids to hidden states, and those to logits."""

from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from dragoman.engines.local.pytorch.adapters import AdapterSet, Multiply
from dragoman.engines.local.pytorch.architectures import RotaryFrequencies
from dragoman.engines.local.pytorch.quantized import Matrix, multiply
from dragoman.engines.local.pytorch.reference_ops import StepBatch
from dragoman.engines.local.pytorch.weights import LayerWeights, ModelWeights


class ForwardPass:
    """Forward pass of a model with a paged KV cache. `operations` is the module `plain` or `kernels`.

    With `fixed_rows` each product has this many rows at a time (see `multiply_in_blocks`).
    """

    def __init__(
        self,
        weights: ModelWeights,
        operations: ModuleType,
        pages: int,
        page: int,
        context: int,
        fixed_rows: int = 0,
    ) -> None:
        shape = self._shape = weights.shape
        self._weights = weights
        self._do = operations
        self._multiply: Multiply = multiply
        if fixed_rows:
            self._multiply = partial(multiply_in_blocks, multiply, fixed_rows)
        self._fixed_rows = fixed_rows
        self.adapters = AdapterSet()
        # Rounded to the type of the weights, as it was in training.
        self._embedding_scale = weights.embedding.new_tensor(shape.embedding_scale)
        self.keys, self.values = (
            weights.embedding.new_zeros(shape.layers, pages, page, shape.kv_heads, shape.head)
            for _ in range(2)
        )
        device = weights.embedding.device
        known: dict[RotaryFrequencies, Tensor] = {}
        self._waves = []
        for layer in range(shape.layers):
            rotary = shape.rotary_of(layer)
            if rotary not in known:
                known[rotary] = _waves(rotary, context).to(device)
            self._waves.append(known[rotary])

    def states(self, batch: StepBatch) -> Tensor:
        """Return the last hidden states of all rows, normalized."""
        shape, weights, do = self._shape, self._weights, self._do
        ids = torch.where(batch.ids < 0, batch.chosen[(~batch.ids).clamp(min=0)], batch.ids)
        states = weights.embedding[ids]
        if shape.embedding_scale != 1:
            states = states * self._embedding_scale
        normed = do.norm(states, weights.layers[0].attention_norm, shape.epsilon, shape.norm_from_one)
        following = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]
        for number, (layer, after) in enumerate(zip(weights.layers, following, strict=True)):
            more = self._attention(normed, layer, number, batch)
            more = self._outer(more, layer.outer_attention_norm)
            states, normed = do.add_norm(states, more, layer.inner_norm, shape.epsilon, shape.norm_from_one)
            more = self._outer(self._inner(normed, layer, number, batch), layer.outer_inner_norm)
            states, normed = do.add_norm(states, more, after, shape.epsilon, shape.norm_from_one)
        return normed

    def logits(self, states: Tensor) -> Tensor:
        """Compute logits in float32: in 16 bits a logit of 20 would be accurate to a sixteenth."""
        head = self._weights.head
        if not self._fixed_rows:
            return _multiply_wide(states, head)
        return multiply_in_blocks(_multiply_wide, self._fixed_rows, states, head)

    def copy_page(self, source: int, target: int) -> None:
        for kept in (self.keys, self.values):
            kept[:, target] = kept[:, source]

    def _outer(self, more: Tensor, weight: Tensor | None) -> Tensor:
        shape = self._shape
        return more if weight is None else self._do.norm(more, weight, shape.epsilon, shape.norm_from_one)

    def _attention(self, normed: Tensor, layer: LayerWeights, number: int, batch: StepBatch) -> Tensor:
        shape, do = self._shape, self._do
        joined = self._product(normed, layer, number, "projection", batch)
        keys, values = self.keys[number], self.values[number]
        norms = None
        if layer.query_norm is not None:
            norms = (layer.query_norm, layer.key_norm, shape.epsilon, shape.norm_from_one)
        queries = do.rotate_and_keep(joined, keys, values, self._waves[number], batch, shape.heads, norms)
        result = do.attend(queries, keys, values, batch, shape.attention_scale, shape.window_of(number))
        return self._product(result.view(len(result), -1), layer, number, "output", batch)

    def _product(
        self, states: Tensor, layer: LayerWeights, number: int, name: str, batch: StepBatch
    ) -> Tensor:
        bias = {"projection": layer.bias, "output": layer.output_bias}.get(name)
        result = self._multiply(states, getattr(layer, name), bias)
        if batch.shares is None:
            return result
        return self.adapters.add(result, states, batch.shares, number, name, self._multiply)

    def _inner(self, normed: Tensor, layer: LayerWeights, number: int, batch: StepBatch) -> Tensor:
        shape = self._shape
        if layer.up is not None:
            opened = self._do.gate(self._product(normed, layer, number, "up", batch), shape.gelu)
            return self._product(opened, layer, number, "down", batch)
        assert layer.router is not None and layer.experts_up is not None and layer.experts_down is not None
        likely = self._multiply(normed, layer.router).float().softmax(-1)
        shares, chosen = likely.topk(shape.used_experts, -1)
        if shape.shares_add_to_one:
            shares = shares / shares.sum(-1, keepdim=True)
        result = torch.zeros_like(normed, dtype=torch.float32)
        for expert in range(shape.experts):
            row, index = (chosen == expert).nonzero(as_tuple=True)
            if len(row):
                raised = self._multiply(normed[row], layer.experts_up[expert])
                mixed = self._multiply(self._do.gate(raised, shape.gelu), layer.experts_down[expert])
                result.index_add_(0, row, mixed.float() * shares[row, index, None])
        return result.to(normed.dtype)


def multiply_in_blocks(multiply: Multiply, rows: int, states: Tensor, *weights: Matrix | None) -> Tensor:
    """Compute a product in blocks with a fixed number of rows, the last of which is padded.

    Libraries select the algorithm of a product by its number of rows, and with it the order in which a row's
    numbers are added up. With a fixed number there is one order, whatever else is in the step.
    """
    count = len(states)
    padded = F.pad(states, (0, 0, 0, -count % rows))
    return torch.cat([multiply(part, *weights) for part in padded.split(rows)])[:count]


def _multiply_wide(states: Tensor, head: Tensor) -> Tensor:
    if head.dtype == torch.float32:
        return F.linear(states, head)
    if head.is_cuda:
        return torch.mm(states, head.t(), out_dtype=torch.float32)
    return F.linear(states.float(), head.float())


def _waves(rotary: RotaryFrequencies, context: int) -> Tensor:
    """Return the cosines and sines of each position, side by side."""
    speeds = torch.tensor(rotary.speeds, dtype=torch.float32)
    angles = torch.arange(context, dtype=torch.float32)[:, None] * speeds[None]
    return torch.cat([angles.cos(), angles.sin()], -1) * rotary.strength
