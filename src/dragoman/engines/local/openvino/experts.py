"""A layer of many experts, of which each row uses a few.

It is written as such models are exported: all rows go to all experts, and what was not chosen is multiplied
by zero. The runtime knows this form and computes only what was chosen, each row by itself with each of its
experts: so its bits do not depend on the others. It knows the form by its nodes; other nodes would give the
same numbers, but compute all experts.
"""

from collections.abc import Sequence

import numpy as np
import openvino.opset15 as ops
from numpy.typing import NDArray

from dragoman.engines.local.openvino.tensors import Node

_ROWS, _EXPERTS = np.int64(0), np.int64(1)


def mixed(states: Node, read: Node, router: NDArray[np.float32], experts: Sequence[Node], used: int) -> Node:
    """`states` are [batch, tokens, width], `experts` gate, up and down, each [experts, outputs, inputs].

    Here a row that nobody reads would cost as much as another, so only the first `read` ones are computed.
    """
    count, width = router.shape
    whole = ops.reshape(states, _integers(-1, width), False)
    rows = ops.slice(whole, _integers(0), read, _integers(1), _integers(0))
    everywhere = ops.reshape(ops.tile(rows, _integers(count, 1)), _integers(count, -1, width), False)
    gate, up, down = experts
    raised = ops.matmul(everywhere, gate, False, True)
    # Not swish, which has a second input in Python; the runtime's pattern has one.
    opened = ops.multiply(raised, ops.sigmoid(raised))
    found = ops.matmul(ops.multiply(opened, ops.matmul(everywhere, up, False, True)), down, False, True)
    apart = ops.reshape(found, _integers(count, 1, -1, width), False)
    shares = ops.transpose(_shares(rows, router, used), _integers(1, 0))
    shares = ops.unsqueeze(ops.reshape(shares, _integers(count, 1, -1), False), _integers(-1))
    mixture = ops.reduce_sum(ops.multiply(apart, shares), _integers(0), False)
    missing = ops.subtract(ops.gather(ops.shape_of(whole), _integers(0), ops.constant(_ROWS)), read)
    ends = ops.concat([_integers(0), missing, _integers(0)], 0)
    return ops.reshape(ops.pad(mixture, _integers(0, 0, 0), ends, "constant"), ops.shape_of(states), False)


def _shares(rows: Node, router: NDArray[np.float32], used: int) -> Node:
    """How much of each expert a row has: [rows, experts], in sum 1."""
    likely = ops.softmax(ops.matmul(rows, ops.constant(router), False, True), -1)
    best = ops.topk(likely, ops.constant(np.int64(used)), -1, "max", "value", "i32")
    chosen = ops.divide(best.output(0), ops.reduce_sum(best.output(0), _integers(-1), True))
    none = ops.broadcast(ops.constant(np.float32(0)), ops.shape_of(likely))
    return ops.scatter_elements_update(none, best.output(1), chosen, ops.constant(_EXPERTS))


def _integers(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)
