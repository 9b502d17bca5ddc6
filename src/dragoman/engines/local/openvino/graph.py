"""A decoder of the llama family as a graph of OpenVINO's operations.

It is written as models are exported elsewhere: stateful, with attention over what was kept. The runtime's own
transformation makes paged attention of that, so what is built here and what comes as a folder go one way.
"""

from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from numpy.typing import NDArray
from openvino.op.util import Variable, VariableInfo

from dragoman.engines.local.openvino.family import Shape
from dragoman.engines.local.openvino.tensors import FINE, Node, Part, Tensors

QUANTIZED = ("runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
"""Where a graph says in what groups activations are quantized; exported ones say it there too."""
HEAD_QUANTIZED = ("dragoman", "head_group")
"""The same for the last product, where it is another."""
_FIRST, _LAST = np.int64(0), np.int64(2)
_FAR = 2**63 - 1
_MASKED = np.float32(-65504)


def build(tensors: Tensors, shape: Shape) -> ov.Model:
    return _Decoder(tensors, shape).model()


class _Decoder:
    def __init__(self, tensors: Tensors, shape: Shape) -> None:
        self._tensors = tensors
        self._shape = shape
        self._ids = _parameter("input_ids", [-1, -1], np.int64)
        self._mask = _parameter("attention_mask", [-1, -1], np.int64)
        self._positions = _parameter("position_ids", [-1, -1], np.int64)
        self._beams = _parameter("beam_idx", [-1], np.int32)
        self._batch = _dimension(self._ids, 0)
        self._cosines, self._sines = self._angles()
        self._bias = self._causal()
        self._kept: list[Node] = []

    def model(self) -> ov.Model:
        table = self._tensors.table("token_embd.weight")
        states = ops.gather(table, self._ids, ops.constant(_FIRST))
        for layer in range(self._shape.layers):
            states = self._layer(states, f"blk.{layer}.")
        states = self._norm(states, "output_norm.weight")
        head = self._tensors.table("output.weight") if "output.weight" in self._tensors else table
        logits = ops.matmul(states, head, False, True)
        logits.output(0).get_tensor().set_names({"logits"})
        inputs = [self._ids, self._mask, self._positions, self._beams]
        model = ov.Model([ops.result(logits)], self._kept, inputs, "decoder")
        model.set_rt_info(self._tensors.group, [*QUANTIZED])
        model.set_rt_info(FINE, [*HEAD_QUANTIZED])
        return model

    def _layer(self, states: Node, name: str) -> Node:
        states = ops.add(states, self._attention(self._norm(states, name + "attn_norm.weight"), name))
        inner = self._norm(states, name + "ffn_norm.weight")
        # What is multiplied by the same states is one product: fewer, larger ones are faster.
        both = self._linear(inner, Part(name + "ffn_gate"), Part(name + "ffn_up"))
        gate, up = ops.split(both, ops.constant(_LAST), 2).outputs()
        raised = ops.multiply(ops.swish(gate), up)
        return ops.add(states, self._linear(raised, Part(name + "ffn_down")))

    def _attention(self, states: Node, name: str) -> Node:
        shape = self._shape
        paired = (shape.heads, shape.kv_heads) if shape.paired else (0, 0)
        parts = [Part(name + "attn_q", paired[0]), Part(name + "attn_k", paired[1]), Part(name + "attn_v")]
        widths = _integers(*(heads * shape.head for heads in (shape.heads, shape.kv_heads, shape.kv_heads)))
        whole = ops.variadic_split(self._linear(states, *parts), ops.constant(_LAST), widths)
        query = self._rotate(self._heads(whole.output(0), name + "attn_q", shape.heads))
        key = self._rotate(self._heads(whole.output(1), name + "attn_k", shape.kv_heads))
        value = self._heads(whole.output(2), name + "attn_v", shape.kv_heads)
        found = ops.scaled_dot_product_attention(
            query,
            self._keep(key, name + "key"),
            self._keep(value, name + "value"),
            self._bias,
            ops.constant(np.float32(shape.head**-0.5)),
        )
        joined = ops.reshape(ops.transpose(found, _integers(0, 2, 1, 3)), _integers(0, 0, -1), True)
        return self._linear(joined, Part(name + "attn_output"))

    def _heads(self, flat: Node, name: str, heads: int) -> Node:
        """[batch, tokens, width] to [batch, heads, tokens, width of a head]."""
        split = ops.reshape(flat, _integers(0, 0, heads, self._shape.head), True)
        if name + "_norm.weight" in self._tensors:
            split = self._norm(split, name + "_norm.weight")
        return ops.transpose(split, _integers(0, 2, 1, 3))

    def _linear(self, states: Node, *parts: Part) -> Node:
        weights = [Part(part.name + ".weight", part.paired_heads) for part in parts]
        product = ops.matmul(states, self._tensors.matrix(*weights), False, True)
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

    def _angles(self) -> tuple[Node, Node]:
        """Cosines and sines of [batch, 1, tokens, width of a head], for every position."""
        width = self._shape.head
        speeds = 1.0 / self._shape.base ** (np.arange(0, width, 2, dtype=np.float64) / width)
        if "rope_freqs.weight" in self._tensors:
            speeds = speeds / self._tensors.vector("rope_freqs.weight")
        positions = ops.convert(ops.unsqueeze(self._positions, _integers(1)), "f32")
        column = ops.constant(speeds.astype(np.float32).reshape(1, -1, 1))
        half = ops.transpose(ops.matmul(column, positions, False, False), _integers(0, 2, 1))
        angles = ops.concat([half, half], -1)
        return ops.unsqueeze(ops.cos(angles), _integers(1)), ops.unsqueeze(ops.sin(angles), _integers(1))

    def _rotate(self, states: Node) -> Node:
        half = self._shape.head // 2
        upper = ops.slice(states, _integers(half), _integers(_FAR), _integers(1), _integers(3))
        lower = ops.slice(states, _integers(0), _integers(half), _integers(1), _integers(3))
        turned = ops.concat([ops.multiply(upper, ops.constant(np.float32(-1))), lower], -1)
        return ops.add(ops.multiply(states, self._cosines), ops.multiply(turned, self._sines))

    def _causal(self) -> Node:
        """Nothing sees what comes after it. Paged attention knows that; the stateful graph has to say it."""
        length = ops.squeeze(_dimension(self._mask, 1), _integers(0))
        columns = ops.range(ops.constant(_FIRST), length, ops.constant(np.int64(1)), "i64")
        rows = ops.unsqueeze(self._positions, _integers(1, 3))
        seen = ops.less_equal(ops.reshape(columns, _integers(1, 1, 1, -1), False), rows)
        return ops.select(seen, ops.constant(np.float32(0)), ops.constant(_MASKED))

    def _keep(self, states: Node, name: str) -> Node:
        """What was kept and what is new, one after the other, once for each head that asks for it."""
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


def _integers(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)
