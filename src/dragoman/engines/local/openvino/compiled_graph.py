"""A graph compiled for this machine: the body with the paged KV cache, and the head.

They are separate because the head computes logits. In the body's precision, bfloat16, a logit of 20 would be
accurate to a sixteenth; the head computes in float32, and only for the requested rows. It also returns the
maximum of each block of logits, so that likely ids are found without a scan of the whole row. A third graph
computes the sum of all relative probabilities, if needed.
"""

import ctypes
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from msgspec import Struct
from numpy.typing import NDArray
from openvino._offline_transformations import paged_attention_transformation

from dragoman.engines.local import hardware
from dragoman.engines.local.openvino.adapters import LoraAdapter, add_adapters
from dragoman.engines.local.openvino.architectures import OpenVinoUnsupported
from dragoman.engines.local.openvino.graph import HEAD_QUANTIZED, QUANTIZED, WINDOWS
from dragoman.engines.local.openvino.row_layout import READ
from dragoman.engines.sampling.sampler import BLOCK, BlockStats, worth_totals

# The alternate signal stack of a thread, protected from OpenVINO.
#
# The CPU plugin gives the thread that creates it a signal stack of its own. When it is destroyed, it unmaps
# that memory and resets the stack of the thread on which that happens: if another thread releases the graph,
# as in a server that stops, the first is left with a stack that no longer exists. Python handles signals on
# such a stack if there is one, so the next signal would end the process with SIGSEGV. Therefore the thread's
# previous stack is restored once the plugin is created.


_DISABLED = 2


class _SignalStack(ctypes.Structure):
    """`stack_t` as on Linux."""

    _fields_ = (("place", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def signal_stack_kept() -> Iterator[None]:
    """Restore this thread's signal stack after the block, whatever the block has set."""
    if sys.platform != "linux":
        # Elsewhere the plugin sets none.
        yield
        return
    libc, before = ctypes.CDLL(None), _SignalStack()
    libc.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        if not before.place:
            before.flags = _DISABLED
        libc.sigaltstack(ctypes.byref(before), None)


def signal_stack() -> int | None:
    """Return the address of this thread's signal stack; None if signals use the normal stack."""
    stack = _SignalStack()
    if sys.platform == "linux":
        ctypes.CDLL(None).sigaltstack(None, ctypes.byref(stack))
    index: int | None = stack.place
    return index


# The graph.


Array: TypeAlias = NDArray[Any]
_log = logging.getLogger("dragoman.engine")
PRECISIONS = {"int8": "u8", "bf16": "bf16", "f16": "f16"}
# With scales for a whole page, which is the default, its contents would be rounded again with each added
# token, and depend on how it was filled. A scale for each token takes less memory and is as exact.
_EACH_TOKEN = {"KEY_CACHE_QUANT_MODE": "BY_TOKEN"}
_CACHES = ("key_cache.", "value_cache.")
_KEY_CACHE, _WINDOW = 3, 10
"""Inputs of paged attention, by number."""
# For each new number of rows the runtime prepares a megabyte of code, in about four pieces. By default
# thousands of them are cached; this limits the cache to the most recent, about 150 MB.
_PREPARED = 512


# Compile exponentials and sums into one kernel although the number of rows varies: this takes half the time,
# and stores no intermediate results.
_AT_ONCE = {"SNIPPETS_MODE": "IGNORE_CALLBACK"}
# Numbers added up in one sum; float32 is exact enough for this many.
_PART = 512


class CompiledGraph(Struct):
    body: Any
    head: Any
    totals: Any
    vocabulary: int
    page: int
    """Tokens in a page of the KV cache."""
    page_bytes: int
    """Bytes of one page in all layers."""
    weights: Path
    """The mapped file of weights."""
    adapters: tuple[str, ...] = ()
    mixes: bool = False
    """Whether it has experts, so that every row reads its own weights."""


def best_kv_cache() -> str:
    """Select the KV cache type. bfloat16 is the fastest to read, if the CPU has it: by a quarter at 2,000
    tokens.
    """
    if _has_tiles():
        return "f16"
    return "bf16" if has_bfloat16() else "int8"


def has_bfloat16() -> bool:
    with signal_stack_kept():
        return "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _has_tiles() -> bool:
    """Whether the CPU has AMX.

    On the one that was measured, products in bfloat16 had other bits from five rows on, and a step padded to
    that took twice as long for one client. In float32, with int8 products as elsewhere, steps of 1 to 32
    answers were faster by 5 to 35 %; prefill took a quarter to a half longer.
    """
    return "amx_bf16" in hardware.cpu_flags()


def compile_graph(
    file: Path, *, threads: int, kv_cache: str, adapters: Sequence[LoraAdapter] = ()
) -> CompiledGraph:
    core = ov.Core()
    model = core.read_model(file)
    if adapters:
        add_adapters(model, adapters, _groups(model, QUANTIZED)[QUANTIZED[-1]])
    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise OpenVinoUnsupported("its attention cannot be kept in pages") from error
    _set_windows(model)
    body, head = _divide(model)
    common: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "CPU_RUNTIME_CACHE_CAPACITY": _PREPARED,
    }
    common |= _groups(model, QUANTIZED)
    kept = {"KV_CACHE_PRECISION": PRECISIONS[kv_cache]} | _EACH_TOKEN
    if _has_tiles() and kv_cache != "bf16":
        kept["INFERENCE_PRECISION_HINT"] = "f32"
    precise = {"INFERENCE_PRECISION_HINT": "f32"} | _groups(model, HEAD_QUANTIZED)
    try:
        with signal_stack_kept():
            result = core.compile_model(body, "CPU", common | kept)
            wanted = core.compile_model(head, "CPU", common | precise)
            summing = core.compile_model(
                _summing(_vocabulary(wanted)), "CPU", common | precise | _beside(threads) | _AT_ONCE
            )
    except RuntimeError as error:
        _log.warning("OpenVINO refused the graph", exc_info=error)
        raise OpenVinoUnsupported("it cannot be compiled for this machine") from error
    caches = [port for port in result.inputs if port.any_name.startswith(_CACHES)]
    values = [port for port in caches if port.any_name.startswith("value_cache.")]
    return CompiledGraph(
        body=result,
        head=wanted,
        totals=summing,
        vocabulary=_vocabulary(wanted),
        page=values[0].partial_shape[2].get_length(),
        page_bytes=sum(math.prod(_shape(port, 1)) * port.element_type.size for port in caches),
        weights=file.with_suffix(".bin"),
        adapters=tuple(adapter.name for adapter in adapters),
        mixes=any(port.any_name == READ for port in result.inputs),
    )


def _beside(threads: int) -> dict[str, Any]:
    """Return settings for work done while Python runs: on cores that are free then, without pinning."""
    return {"INFERENCE_NUM_THREADS": max(1, threads // 2), "ENABLE_CPU_PINNING": False}


class GraphBody:
    """Inference request of the body, with memory for `pages` pages, which is touched only as far as it is
    used.

    A run is never cancelled. `InferRequest.cancel` stops between two nodes of the graph: those before it keep
    the shapes of the cancelled run, and those behind it the shapes of the run before. A later run with the
    earlier shapes then skips their shape inference, and fails or computes something else. For short
    reactions, the scheduler keeps runs short instead.
    """

    def __init__(
        self, compiled: CompiledGraph, pages: int, tensors: Mapping[str, ov.Tensor] | None = None
    ) -> None:
        """`tensors` is that memory, if another body of the same weights has it already."""
        self._request = compiled.body.create_infer_request()
        self._inputs = {port.any_name for port in compiled.body.inputs}
        self.tensors = dict(tensors or {})
        self._caches: list[Array] = []
        self._said: dict[str, Array] = {}
        """The last inputs, in memory that the request keeps reading."""
        for port in compiled.body.inputs:
            name = port.any_name
            if name.startswith(_CACHES):
                if name not in self.tensors:
                    self.tensors[name] = ov.Tensor(port.element_type, ov.Shape(_shape(port, pages)))
                self._request.set_tensor(name, self.tensors[name])
                self._caches.append(self.tensors[name].data.reshape(pages, -1))

    def run(self, inputs: dict[str, Array]) -> Array:
        """Return the hidden states of all rows: a view that the next run overwrites."""
        for name in self._inputs & inputs.keys():
            self._say(name, inputs[name])
        self._request.infer()
        states: Array = self._request.get_output_tensor(0).data
        return states.reshape(len(inputs["input_ids"]), -1)

    def _say(self, name: str, values: Array) -> None:
        """Set an input. If its shape is unchanged, as in most steps, only the numbers are copied."""
        array = self._said.get(name)
        if array is not None and array.shape == values.shape:
            np.copyto(array, values)
            return
        tensor = ov.Tensor(values)
        self._request.set_tensor(name, tensor)
        self._said[name] = tensor.data

    def copy_page(self, source: int, target: int) -> None:
        for cache in self._caches:
            cache[target] = cache[source]


class OutputHead:
    def __init__(self, compiled: CompiledGraph) -> None:
        self._request = compiled.head.create_infer_request()
        self._summing = compiled.totals.create_infer_request()
        self._has_maxima = len(compiled.head.outputs) > 1
        self._heat: Array | None = None
        """Inverse temperatures of the rows whose totals are being computed and were not fetched; None if
        there are none.
        """
        self.blocks: BlockStats | None = None

    def run(self, states: Array, heat: Sequence[float] = ()) -> Array:
        """Return rows of logits: a view that the next run overwrites, like the maxima of the blocks.

        Totals at these inverse temperatures are started, and computed in parallel until they are fetched.
        """
        self._wait()
        self._request.set_input_tensor(0, ov.Tensor(states[:, None]))
        self._request.infer()
        logits: Array = self._request.get_output_tensor(0).data
        if self._has_maxima:
            maxima = self._request.get_output_tensor(1).data
            self.blocks = BlockStats(maxima, self._totals)
            if worth_totals(sum(map(bool, heat)), len(states)):
                self._begin(maxima.max(axis=1), np.array(heat, np.float32))
        return logits.reshape(len(states), -1)

    def _totals(self, peaks: Array, heat: Array) -> Array:
        # Requests with the same values mean the same rows, and those are unmodified.
        if self._heat is None or not np.array_equal(self._heat, heat):
            self._wait()
            self._begin(peaks, heat)
        self._wait()
        parts: Array = self._summing.get_output_tensor(0).data
        totals: Array = parts.reshape(len(peaks), -1).sum(axis=1)
        return totals

    def _begin(self, peaks: Array, heat: Array) -> None:
        self._summing.set_input_tensor(0, self._request.get_output_tensor(0))
        self._summing.set_input_tensor(1, ov.Tensor(peaks.reshape(-1, 1, 1)))
        self._summing.set_input_tensor(2, ov.Tensor(heat.reshape(-1, 1, 1)))
        self._summing.start_async()
        self._heat = heat

    def _wait(self) -> None:
        if self._heat is not None:
            self._heat = None
            self._summing.wait()


def _groups(model: ov.Model, pair: tuple[str, str]) -> dict[str, Any]:
    """Return the group size for quantized activations, if the graph has one."""
    if not model.has_rt_info([*pair]):
        return {}
    return {QUANTIZED[-1]: int(model.get_rt_info([*pair]).astype(int))}


def _set_windows(model: ov.Model) -> None:
    """Set the attention windows of layers, if the graph has any, in the order of the layers."""
    if not model.has_rt_info([*WINDOWS]):
        return
    windows = [int(text) for text in str(model.get_rt_info([*WINDOWS]).astype(str)).split(",")]
    for node in model.get_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            layer = int(node.input_value(_KEY_CACHE).get_node().get_friendly_name().rpartition(".")[2])
            window = ops.constant(np.int32(windows[layer]))
            node.input(_WINDOW).replace_source_output(window.output(0))


def _divide(model: ov.Model) -> tuple[ov.Model, ov.Model]:
    """Split a graph before its last matrix product."""
    result = model.get_results()[0]
    node = result.input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        if not node.get_input_size():
            raise OpenVinoUnsupported("its last matrix product was not found")
        node = node.input_value(0).get_node()
    states = node.input_value(0)
    parameter = ops.parameter(states.get_partial_shape(), np.float32)
    node.input(0).replace_source_output(parameter.output(0))
    body = ov.Model([ops.result(states)], model.get_parameters(), "body")
    return body, ov.Model([result, *_maxima(result.input_value(0))], [parameter], "head")


def _maxima(logits: ov.Output) -> list[ov.Node]:
    """Return a node for the maximum of each block, if the vocabulary is a multiple of the block size."""
    vocabulary = logits.get_partial_shape()[-1].get_length()
    if vocabulary % BLOCK:
        return []
    blocks = ops.reshape(logits, np.array([-1, vocabulary // BLOCK, BLOCK]), special_zero=False)
    return [ops.result(ops.reduce_max(blocks, np.array([-1])))]


def _summing(vocabulary: int) -> ov.Model:
    """Create a graph that, for rows of logits with a peak and an inverse temperature each, sums exp((logit
    - peak) * heat), in parts.
    """
    logits = ops.parameter([-1, 1, vocabulary], np.float32)
    peaks, heat = (ops.parameter([-1, 1, 1], np.float32) for _ in range(2))
    size = math.gcd(vocabulary, _PART)
    parts = ops.reshape(logits, np.array([-1, vocabulary // size, size]), special_zero=False)
    weights = ops.exp(ops.multiply(ops.subtract(parts, peaks), heat))
    return ov.Model(
        [ops.result(ops.reduce_sum(weights, np.array([-1]), True))], [logits, peaks, heat], "totals"
    )


def _vocabulary(head: Any) -> int:
    count: int = head.output(0).partial_shape[-1].get_length()
    return count


def _shape(port: Any, pages: int) -> list[int]:
    return [pages, *(port.partial_shape[axis].get_length() for axis in range(1, 4))]
