"""A decoder of the llama family as a graph of OpenVINO's operations.

It has the form of models exported elsewhere: stateful, with attention over a cache. The runtime's own
transformation turns that into paged attention, so graphs built here and exported folders are handled alike.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from numpy.typing import NDArray
from openvino.op.util import Variable, VariableInfo

from dragoman.engines.local.openvino.adapters import MatrixProduct
from dragoman.engines.local.openvino.architectures import ModelShape, RopeConfig
from dragoman.engines.local.openvino.row_layout import READ
from dragoman.engines.local.openvino.tensors import FINE, GraphWeights, MatrixPart, Node

# A layer of many experts, of which each row uses a few.
#
# It has the form of exported models: all rows go to all experts, and the results of experts that were not
# selected are multiplied by zero. The runtime recognizes this form and computes only the selected experts,
# each row separately with each of its experts, so a row's bits do not depend on the others. It recognizes the
# form by its nodes; other nodes would give the same numbers, but compute all experts.


_ROWS, _EXPERTS = np.int64(0), np.int64(1)


def mix_experts(
    states: Node, read: Node, router: NDArray[np.float32], experts: Sequence[Node], used: int
) -> Node:
    """Build the mixture. `states` are [batch, tokens, width], `experts` gate, up and down, each [experts,
    outputs, inputs].

    Here a padding row would cost as much as any other, so only the first `read` rows are computed.
    """
    count, width = router.shape
    whole = ops.reshape(states, _integers(-1, width), False)
    rows = ops.slice(whole, _integers(0), read, _integers(1), _integers(0))
    everywhere = ops.reshape(ops.tile(rows, _integers(count, 1)), _integers(count, -1, width), False)
    gate, up, down = experts
    raised = ops.matmul(everywhere, gate, False, True)
    # Not swish, which has a second input in Python; the runtime's pattern has one.
    opened = ops.multiply(raised, ops.sigmoid(raised))
    result = ops.matmul(ops.multiply(opened, ops.matmul(everywhere, up, False, True)), down, False, True)
    apart = ops.reshape(result, _integers(count, 1, -1, width), False)
    shares = ops.transpose(_shares(rows, router, used), _integers(1, 0))
    shares = ops.unsqueeze(ops.reshape(shares, _integers(count, 1, -1), False), _integers(-1))
    mixture = ops.reduce_sum(ops.multiply(apart, shares), _integers(0), False)
    missing = ops.subtract(ops.gather(ops.shape_of(whole), _integers(0), ops.constant(_ROWS)), read)
    ends = ops.concat([_integers(0), missing, _integers(0)], 0)
    return ops.reshape(ops.pad(mixture, _integers(0, 0, 0), ends, "constant"), ops.shape_of(states), False)


def _shares(rows: Node, router: NDArray[np.float32], used: int) -> Node:
    """Return the share of each expert in a row: [rows, experts], with sum 1."""
    likely = ops.softmax(ops.matmul(rows, ops.constant(router), False, True), -1)
    best = ops.topk(likely, ops.constant(np.int64(used)), -1, "max", "value", "i32")
    chosen = ops.divide(best.output(0), ops.reduce_sum(best.output(0), _integers(-1), True))
    none = ops.broadcast(ops.constant(np.float32(0)), ops.shape_of(likely))
    return ops.scatter_elements_update(none, best.output(1), chosen, ops.constant(_EXPERTS))


def _integers(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


# The decoder.


QUANTIZED = ("runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
"""Where a graph has the group size for quantized activations; exported graphs have it there, too."""
HEAD_QUANTIZED = ("dragoman", "head_group")
"""The same for the last product, if it differs."""
WINDOWS = ("dragoman", "windows")
"""Attention windows of the layers in tokens, 0 for none, if they differ; set on the paged graph."""
_FIRST, _LAST = np.int64(0), np.int64(2)
_MASKED = np.float32(-65504)


def build(tensors: GraphWeights, shape: ModelShape) -> ov.Model:
    return _Decoder(tensors, shape).model()


class _Decoder:
    def __init__(self, tensors: GraphWeights, shape: ModelShape) -> None:
        self._tensors = tensors
        self._shape = shape
        self._ids = _parameter("input_ids", [-1, -1], np.int64)
        self._mask = _parameter("attention_mask", [-1, -1], np.int64)
        self._positions = _parameter("position_ids", [-1, -1], np.int64)
        self._beams = _parameter("beam_idx", [-1], np.int32)
        self._read = _parameter(READ, [1], np.int64)
        self._batch = _dimension(self._ids, 0)
        self._angles: dict[RopeConfig, tuple[Node, Node]] = {}
        self._bias = self._causal()
        self._kept: list[Node] = []

    def model(self) -> ov.Model:
        table = self._tensors.table("token_embd.weight")
        states = _scale(ops.gather(table, self._ids, ops.constant(_FIRST)), self._shape.embedding_scale)
        for layer in range(self._shape.layers):
            states = self._layer(states, layer)
        states = self._norm(states, "output_norm.weight")
        head = self._tensors.table("output.weight") if "output.weight" in self._tensors else table
        logits = _scale(ops.matmul(states, head, False, True), self._shape.logit_scale)
        logits.output(0).get_tensor().set_names({"logits"})
        inputs = [self._ids, self._mask, self._positions, self._beams]
        if self._shape.used_experts:
            inputs.append(self._read)
        model = ov.Model([ops.result(logits)], self._kept, inputs, "decoder")
        model.set_rt_info(self._tensors.group, [*QUANTIZED])
        model.set_rt_info(FINE, [*HEAD_QUANTIZED])
        windows = [self._shape.window_of(layer) for layer in range(self._shape.layers)]
        if any(windows):
            model.set_rt_info(",".join(map(str, windows)), [*WINDOWS])
        return model

    def _layer(self, states: Node, layer: int) -> Node:
        name = f"blk.{layer}."
        result = self._attention(self._norm(states, name + "attn_norm.weight"), layer)
        states = self._add(states, result, name + "post_attention_norm.weight")
        inner = self._norm(states, name + "ffn_norm.weight")
        return self._add(states, self._inner(inner, name), name + "post_ffw_norm.weight")

    def _add(self, states: Node, more: Node, norm: str) -> Node:
        if norm in self._tensors:
            more = self._norm(more, norm)
        return ops.add(states, _scale(more, self._shape.residual_scale))

    def _inner(self, states: Node, name: str) -> Node:
        if name + "ffn_gate_inp.weight" not in self._tensors:
            return self._linear(self._gate(states, name), MatrixPart(name + "ffn_down"))
        router = self._tensors.vector(name + "ffn_gate_inp.weight")
        parts = (f"{name}ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
        experts = [self._tensors.experts(part) for part in parts]
        return mix_experts(states, self._read, router, experts, self._shape.used_experts)

    def _gate(self, states: Node, name: str) -> Node:
        # Products with the same input are fused: fewer, larger ones are faster.
        parts = [
            MatrixPart(name + part)
            for part in ("ffn_gate", "ffn_up")
            if f"{name}{part}.weight" in self._tensors
        ]
        gate, up = ops.split(self._linear(states, *parts), ops.constant(_LAST), 2).outputs()
        opened = ops.gelu(gate, "tanh") if self._shape.family.gelu else ops.swish(gate)
        return ops.multiply(opened, up)

    def _attention(self, states: Node, layer: int) -> Node:
        shape, name = self._shape, f"blk.{layer}."
        whole = self._queries_keys_values(states, name)
        rotation = shape.rotation_of(layer)
        query = self._rotate(self._heads(whole.output(0), name + "attn_q", shape.heads), rotation)
        key = self._rotate(self._heads(whole.output(1), name + "attn_k", shape.kv_heads), rotation)
        value = self._heads(whole.output(2), name + "attn_v", shape.kv_heads)
        result = ops.scaled_dot_product_attention(
            query,
            self._keep(key, name + "key"),
            self._keep(value, name + "value"),
            self._bias,
            ops.constant(np.float32(shape.attention_scale)),
        )
        joined = ops.reshape(ops.transpose(result, _integers(0, 2, 1, 3)), _integers(0, 0, -1), True)
        return self._linear(joined, MatrixPart(name + "attn_output"))

    def _queries_keys_values(self, states: Node, name: str) -> Node:
        shape = self._shape
        paired = (shape.heads, shape.kv_heads) if shape.family.paired else (0, 0)
        parts = [
            MatrixPart(name + "attn_q", paired[0]),
            MatrixPart(name + "attn_k", paired[1]),
            MatrixPart(name + "attn_v"),
        ]
        if name + "attn_qkv.weight" in self._tensors:
            parts = [MatrixPart(name + "attn_qkv")]
        widths = _integers(*(heads * shape.head for heads in (shape.heads, shape.kv_heads, shape.kv_heads)))
        return ops.variadic_split(self._linear(states, *parts), ops.constant(_LAST), widths)

    def _heads(self, flat: Node, name: str, heads: int) -> Node:
        """Reshape [batch, tokens, width] to [batch, heads, tokens, width of a head]."""
        split = ops.reshape(flat, _integers(0, 0, heads, self._shape.head), True)
        if name + "_norm.weight" in self._tensors:
            split = self._norm(split, name + "_norm.weight")
        return ops.transpose(split, _integers(0, 2, 1, 3))

    def _linear(self, states: Node, *parts: MatrixPart) -> Node:
        weights = [MatrixPart(part.name + ".weight", part.paired_heads) for part in parts]
        product = self._tensors.product(states, *weights)
        sizes = [self._tensors.outputs(weight.name) for weight in weights]
        product.set_friendly_name(MatrixProduct(tuple(zip(weights, sizes, strict=True))).label)
        if parts[0].name + ".bias" not in self._tensors:
            return product
        biases = [self._tensors.vector(part.name + ".bias") for part in parts]
        return ops.add(product, ops.constant(np.concatenate(biases).reshape(1, 1, -1)))

    def _norm(self, states: Node, name: str) -> Node:
        square = ops.power(states, ops.constant(np.float32(2)))
        mean = ops.add(
            ops.reduce_mean(square, _integers(-1), True), ops.constant(np.float32(self._shape.epsilon))
        )
        normal = ops.multiply(states, ops.divide(ops.constant(np.float32(1)), ops.sqrt(mean)))
        return ops.multiply(normal, ops.constant(self._tensors.vector(name)))

    def _angles_of(self, rotation: RopeConfig) -> tuple[Node, Node]:
        """Return the cosines and sines of [batch, 1, tokens, rotated elements of a head], for every
        position.
        """
        if rotation not in self._angles:
            speeds = np.array(rotation.speeds())
            if "rope_freqs.weight" in self._tensors and rotation is self._shape.rotation:
                speeds = speeds / self._tensors.vector("rope_freqs.weight")
            positions = ops.convert(ops.unsqueeze(self._positions, _integers(1)), "f32")
            column = ops.constant(speeds.astype(np.float32).reshape(1, -1, 1))
            half = ops.transpose(ops.matmul(column, positions, False, False), _integers(0, 2, 1))
            angles = ops.concat([half, half], -1)
            waves = (ops.unsqueeze(wave(angles), _integers(1)) for wave in (ops.cos, ops.sin))
            cosines, sines = (_scale(wave, rotation.strength) for wave in waves)
            self._angles[rotation] = cosines, sines
        return self._angles[rotation]

    def _rotate(self, states: Node, rotation: RopeConfig | None) -> Node:
        if rotation is None:
            return states
        half, whole = rotation.width // 2, self._shape.head
        lower, upper = _columns(states, 0, half), _columns(states, half, rotation.width)
        cosines, sines = self._angles_of(rotation)
        turned = ops.concat([ops.multiply(upper, ops.constant(np.float32(-1))), lower], -1)
        if rotation.width == whole:
            return ops.add(ops.multiply(states, cosines), ops.multiply(turned, sines))
        first = ops.multiply(_columns(states, 0, rotation.width), cosines)
        rest = _columns(states, rotation.width, whole)
        return ops.concat([ops.add(first, ops.multiply(turned, sines)), rest], -1)

    def _causal(self) -> Node:
        """Return the causal mask. Paged attention has it built in; the stateful graph needs it."""
        length = ops.squeeze(_dimension(self._mask, 1), _integers(0))
        columns = ops.range(ops.constant(_FIRST), length, ops.constant(np.int64(1)), "i64")
        rows = ops.unsqueeze(self._positions, _integers(1, 3))
        seen = ops.less_equal(ops.reshape(columns, _integers(1, 1, 1, -1), False), rows)
        return ops.select(seen, ops.constant(np.float32(0)), ops.constant(_MASKED))

    def _keep(self, states: Node, name: str) -> Node:
        """Return the cached and the new states, concatenated and repeated for each head that shares them."""
        heads, width = self._shape.kv_heads, self._shape.head
        info = VariableInfo()
        info.data_shape, info.data_type = ov.PartialShape([-1, heads, -1, width]), ov.Type.f32
        info.variable_id = name
        variable = Variable(info)
        empty = ops.concat([self._batch, _integers(heads), _integers(0), _integers(width)], 0)
        past = ops.read_value(ops.broadcast(ops.constant(np.float32(0)), empty), variable)
        past = ops.gather(past, self._beams, ops.constant(_FIRST))
        whole = ops.concat([past, states], -2)
        self._kept.append(ops.assign(whole, variable))
        if heads == self._shape.heads:
            return whole
        sharers = _integers(self._shape.heads // heads)
        single = ops.unsqueeze(whole, _integers(2))
        sizes = [self._batch, _integers(heads), sharers, _dimension(single, 3), _integers(width)]
        repeated = ops.broadcast(single, ops.concat(sizes, 0), broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(repeated, _integers(0, self._shape.heads, -1, width), True)


def _parameter(name: str, shape: list[int], kind: Any) -> Node:
    parameter = ops.parameter(shape, kind)
    parameter.set_friendly_name(name)
    parameter.output(0).get_tensor().set_names({name})
    return parameter


def _dimension(node: Node, axis: int) -> Node:
    return ops.gather(ops.shape_of(node), _integers(axis), ops.constant(_FIRST))


def _columns(states: Node, start: int, end: int) -> Node:
    return ops.slice(states, _integers(start), _integers(end), _integers(1), _integers(3))


def _scale(node: Node, factor: float) -> Node:
    return node if factor == 1 else ops.multiply(node, ops.constant(np.float32(factor)))
