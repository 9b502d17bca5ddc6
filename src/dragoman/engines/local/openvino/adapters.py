"""LoRA adapters in a graph: an added term beside each matrix product that they change.

`W x` becomes `W x + B (s * (A x))`. The A of all adapters are stacked vertically, their B horizontally; `s`
is an input of the graph: for each row the scales of its adapters, and zeros for the others. A graph without
adapters has none of this.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from gguf import GGUFReader
from gguf.quants import dequantize
from msgspec import Struct
from numpy.typing import NDArray

from dragoman.engines.local.gguf_model import check_file
from dragoman.engines.local.openvino.architectures import OpenVinoUnsupported
from dragoman.engines.local.openvino.tensors import MatrixPart, Node, half_apart, int8_matrix
from dragoman.engines.local.runner import StepRows

INPUT = "adapters"
"""Input [rows, 1, adapters]: the scale of each adapter for each row."""
_A, _B = ".lora_a", ".lora_b"
_IN_LAYERS = re.compile(r"blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down))\.weight")


class LoraTerm(Struct, frozen=True):
    """Matrices of one product. A has as many rows as B has columns: the rank."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]


class LoraAdapter(Struct, frozen=True):
    name: str
    terms: dict[str, LoraTerm]
    """Terms by the names of the weights that they are added to."""


class MatrixProduct(Struct, frozen=True):
    """The weights of a matrix product, as encoded in its node's name: names, outputs, and heads with
    paired rows.
    """

    parts: tuple[tuple[MatrixPart, int], ...]

    @property
    def label(self) -> str:
        return " ".join(f"{part.name}:{outputs}:{part.paired_heads}" for part, outputs in self.parts)

    @classmethod
    def of(cls, label: str) -> "MatrixProduct":
        """Parse the label of a node; the product has no parts if the node is something else."""
        items = [each.split(":") for each in label.split(" ")]
        if any(len(each) != 3 for each in items):
            return cls(())
        return cls(tuple((MatrixPart(name, int(heads)), int(outputs)) for name, outputs, heads in items))


def scales_of(rows: StepRows, names: Sequence[str]) -> NDArray[np.float32]:
    """Return the scales of the adapters for each row: [rows, adapters]."""
    chosen = {slot: dict(adapters) for slot, adapters in rows.adapters.items()}
    scales = {slot: [each.get(name, 0.0) for name in names] for slot, each in chosen.items()}
    none = [0.0] * len(names)
    return np.array([scales.get(slot, none) for slot in rows.slots], np.float32)


def read_adapters(files: Mapping[str, str], architecture: str) -> list[LoraAdapter]:
    """Read adapters. Raises OpenVinoUnsupported for files that are not LoRA of layers; llama.cpp reports the
    details.
    """
    adapters = []
    for name, file in files.items():
        path = Path(file).expanduser()
        check_file(path)
        try:
            adapters.append(LoraAdapter(name, _terms(GGUFReader(path), architecture)))
        except (OSError, ValueError, LookupError, NotImplementedError) as error:
            raise OpenVinoUnsupported(f"the adapter {name!r} cannot be read") from error
        if strange := [each for each in adapters[-1].terms if not _IN_LAYERS.fullmatch(each)]:
            raise OpenVinoUnsupported(f"the adapter {name!r} changes {min(strange)}, which is not supported")
    return adapters


def _terms(reader: GGUFReader, architecture: str) -> dict[str, LoraTerm]:
    fields = {key: reader.fields[key].contents() for key in ("general.architecture", "adapter.type")}
    if list(fields.values()) != [architecture, "lora"] or "adapter.alora.invocation_tokens" in reader.fields:
        raise ValueError(f"not a LoRA of {architecture}")
    alpha = float(reader.fields["adapter.lora.alpha"].contents())
    values = {
        each.name: np.asarray(dequantize(each.data, each.tensor_type), np.float32) for each in reader.tensors
    }
    names = {name.removesuffix(_A) for name in values if name.endswith(_A)}
    if len(values) != 2 * len(names):
        raise ValueError("not all tensors are pairs")
    return {name: _term(values[name + _A], values[name + _B], alpha) for name in names}


def _term(a: NDArray[np.float32], b: NDArray[np.float32], alpha: float) -> LoraTerm:
    return LoraTerm(a, b * np.float32(alpha / len(a)) if alpha else b)


def add_adapters(model: ov.Model, adapters: Sequence[LoraAdapter], group: int) -> None:
    """Add adapters to a graph, before its attention becomes paged. `group` is the quantization group of
    the layers.
    """
    scales = ops.parameter([-1, 1, len(adapters)], np.float32)
    scales.output(0).get_tensor().set_names({INPUT})
    model.add_parameters([scales])
    added: set[str] = set()
    for node in model.get_ordered_ops():
        product = MatrixProduct.of(node.get_friendly_name())
        if any(part.name in adapter.terms for part, _ in product.parts for adapter in adapters):
            _add_term(node, product, _AdapterStack(product, adapters, group), scales, group)
            added.update(part.name for part, _ in product.parts)
    for adapter in adapters:
        if strange := adapter.terms.keys() - added:
            raise OpenVinoUnsupported(
                f"the adapter {adapter.name!r} changes {min(strange)}, which the model has not"
            )


class _AdapterStack:
    """The terms of all adapters for one product.

    Each rank is padded with zeros to a multiple of `group`: numbers of a group are rounded together, and the
    result of an adapter must not depend on the others.
    """

    def __init__(self, product: MatrixProduct, adapters: Sequence[LoraAdapter], group: int) -> None:
        self.lowering: list[NDArray[np.float32]] = []
        self.raising: list[NDArray[np.float32]] = []
        self.owners: list[int] = []
        """The adapter that each rank belongs to."""
        whole, start = sum(outputs for _, outputs in product.parts), 0
        for part, outputs in product.parts:
            for number, adapter in enumerate(adapters):
                if term := adapter.terms.get(part.name):
                    _check(term, adapter.name, part.name, outputs)
                    order = half_apart(outputs, part.paired_heads) if part.paired_heads else slice(None)
                    rank = len(term.a)
                    missing = -rank % group
                    b = np.zeros((whole, rank + missing), np.float32)
                    b[start : start + outputs, :rank] = term.b[order]
                    self.lowering.append(np.pad(term.a, ((0, missing), (0, 0))))
                    self.raising.append(b)
                    self.owners += [number] * (rank + missing)
            start += outputs

    def matrices(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return A and B."""
        return np.concatenate(self.lowering), np.concatenate(self.raising, axis=1)


def _check(term: LoraTerm, adapter: str, name: str, outputs: int) -> None:
    if len(term.b) != outputs or term.b.shape[1] != len(term.a):
        raise OpenVinoUnsupported(f"the adapter {adapter!r} has a different shape than {name}")


def _add_term(node: Node, product: MatrixProduct, stack: _AdapterStack, scales: Node, group: int) -> None:
    states = _states(node)
    a, b = stack.matrices()
    if a.shape[1] != states.get_partial_shape()[2].get_length():
        raise OpenVinoUnsupported(f"an adapter has a different width than {product.parts[0][0].name}")
    users = node.output(0).get_target_inputs()
    lowered = ops.matmul(states, int8_matrix(a, group), False, True)
    shares = ops.gather(scales, ops.constant(np.array(stack.owners)), ops.constant(np.int64(2)))
    raised = ops.matmul(ops.multiply(lowered, shares), int8_matrix(b, group), False, True)
    whole = ops.add(node, raised)
    for user in users:
        user.replace_source_output(whole.output(0))


def _states(node: Node) -> ov.Output:
    """Return the input of a product, which may be put together from several."""
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    return node.input_value(0)
