"""A graph, compiled for this machine: the body, which keeps keys and values in pages, and the head.

They are two, because the head gives logits. In the precision of the body, bfloat16, a logit of 20 would be
known to a sixteenth; the head computes in float32, and only for the rows that are wanted. It also gives the
largest of each block of logits, so that what is likely is found without going through all of them. A third
one, where somebody asks, sums up what all of them weigh.
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

from dragoman.engines.choosing.sampler import BLOCK, RowBlocks, worth_totals
from dragoman.engines.local import machine
from dragoman.engines.local.openvino.adapters import Adapter, add_adapters
from dragoman.engines.local.openvino.family import NotForOpenVino
from dragoman.engines.local.openvino.graph import HEAD_QUANTIZED, QUANTIZED, WINDOWS
from dragoman.engines.local.openvino.layout import READ

# The stack on which signals of a thread are handled, kept out of OpenVINO's hands.
#
# The plugin for CPUs, when it is made, gives the thread that makes it a signal stack of the plugin's own.
# When it goes, it unmaps that memory, and takes the stack back from the thread on which that happens: if
# another thread lets go of the graph, as in a server that stops, the first is left with a stack that is not
# there. Python handles signals on such a stack where there is one, so the next signal would be the
# process's end: by SIGSEGV, and not by what the signal was to do. So what a thread had is put back once the
# plugin is made.


_DISABLED = 2


class _SignalStack(ctypes.Structure):
    """stack_t, as it is on Linux."""

    _fields_ = (("place", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def signal_stack_kept() -> Iterator[None]:
    """After the block this thread handles signals where it did before, whatever the block has set."""
    if sys.platform != "linux":
        # Nobody sets one elsewhere.
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
    """Where this thread handles signals; None: on the stack on which it works."""
    found = _SignalStack()
    if sys.platform == "linux":
        ctypes.CDLL(None).sigaltstack(None, ctypes.byref(found))
    place: int | None = found.place
    return place


# The graph.


Array: TypeAlias = NDArray[Any]
_log = logging.getLogger("dragoman.engine")
PRECISIONS = {"int8": "u8", "bf16": "bf16", "f16": "f16"}
# With scales for a whole page, as is the default, what is in it would be rounded again with each token that
# is added, and depend on how it was filled. A scale for each token is smaller, and no less exact.
_EACH_TOKEN = {"KEY_CACHE_QUANT_MODE": "BY_TOKEN"}
_CACHES = ("key_cache.", "value_cache.")
_KEY_CACHE, _WINDOW = 3, 10
"""Inputs of paged attention, by their numbers."""
# A step with a number of rows that was not there before takes a megabyte of prepared code, in about four
# pieces. Left alone, thousands of them are kept; so these are, the last ones: some 150 MB.
_PREPARED = 512


# Exponentials and sums as one piece of code, though numbers of rows differ: in half the time, and nothing
# is written in between.
_AT_ONCE = {"SNIPPETS_MODE": "IGNORE_CALLBACK"}
# Of what is summed up in one go; float32 is exact enough for so many.
_PART = 512


class Compiled(Struct):
    body: Any
    head: Any
    totals: Any
    vocabulary: int
    page: int
    """Tokens in a page of keys and values."""
    page_bytes: int
    """Of one page in all layers."""
    weights: Path
    """The file of them, which is mapped."""
    adapters: tuple[str, ...] = ()
    mixes: bool = False
    """Whether it has experts, so that every row reads weights of its own."""


def best_kv_cache() -> str:
    """bfloat16 is the fastest to read, where the CPU has it: by a quarter at 2,000 tokens."""
    if _has_tiles():
        return "f16"
    return "bf16" if has_bfloat16() else "int8"


def has_bfloat16() -> bool:
    with signal_stack_kept():
        return "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _has_tiles() -> bool:
    """Whether the CPU has AMX.

    On the one that was measured, products in bfloat16 had other bits from five rows on, and a step that was
    filled up to that took twice as long for one reader. In float32, with int8 products as elsewhere, steps
    of 1 to 32 answers were faster by 5 to 35 %; to read a prompt took a quarter to a half longer.
    """
    return "amx_bf16" in machine.cpu_flags()


def compile_graph(file: Path, *, threads: int, kv_cache: str, adapters: Sequence[Adapter] = ()) -> Compiled:
    core = ov.Core()
    model = core.read_model(file)
    if adapters:
        add_adapters(model, adapters, _groups(model, QUANTIZED)[QUANTIZED[-1]])
    try:
        paged_attention_transformation(model)
    except RuntimeError as error:
        raise NotForOpenVino("its attention cannot be kept in pages") from error
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
            made = core.compile_model(body, "CPU", common | kept)
            wanted = core.compile_model(head, "CPU", common | precise)
            summing = core.compile_model(
                _summing(_vocabulary(wanted)), "CPU", common | precise | _beside(threads) | _AT_ONCE
            )
    except RuntimeError as error:
        _log.warning("OpenVINO refused the graph", exc_info=error)
        raise NotForOpenVino("it cannot be compiled for this machine") from error
    caches = [port for port in made.inputs if port.any_name.startswith(_CACHES)]
    values = [port for port in caches if port.any_name.startswith("value_cache.")]
    return Compiled(
        body=made,
        head=wanted,
        totals=summing,
        vocabulary=_vocabulary(wanted),
        page=values[0].partial_shape[2].get_length(),
        page_bytes=sum(math.prod(_shape(port, 1)) * port.element_type.size for port in caches),
        weights=file.with_suffix(".bin"),
        adapters=tuple(adapter.name for adapter in adapters),
        mixes=any(port.any_name == READ for port in made.inputs),
    )


def _beside(threads: int) -> dict[str, Any]:
    """For what is computed while Python works: on cores that this leaves, whichever those are."""
    return {"INFERENCE_NUM_THREADS": max(1, threads // 2), "ENABLE_CPU_PINNING": False}


class Body:
    """The request of the body, with memory for `pages` pages. It is touched only as far as it is used.

    A run is never cancelled. `InferRequest.cancel` stops between two nodes of the graph: those before it keep
    the shapes of the cancelled run, and those behind it the shapes of the run before. A later run with the
    earlier shapes then skips their shape inference, and fails or computes something else. So whoever wants
    short reactions asks for short runs.
    """

    def __init__(
        self, compiled: Compiled, pages: int, tensors: Mapping[str, ov.Tensor] | None = None
    ) -> None:
        """`tensors` are that memory, where another body of the same weights has it already."""
        self._request = compiled.body.create_infer_request()
        self._inputs = {port.any_name for port in compiled.body.inputs}
        self.tensors = dict(tensors or {})
        self._caches: list[Array] = []
        self._said: dict[str, Array] = {}
        """What the request was told the last time, in memory that it goes on reading."""
        for port in compiled.body.inputs:
            name = port.any_name
            if name.startswith(_CACHES):
                if name not in self.tensors:
                    self.tensors[name] = ov.Tensor(port.element_type, ov.Shape(_shape(port, pages)))
                self._request.set_tensor(name, self.tensors[name])
                self._caches.append(self.tensors[name].data.reshape(pages, -1))

    def run(self, inputs: dict[str, Array]) -> Array:
        """The hidden states of all rows: a view that the next run overwrites."""
        for name in self._inputs & inputs.keys():
            self._say(name, inputs[name])
        self._request.infer()
        states: Array = self._request.get_output_tensor(0).data
        return states.reshape(len(inputs["input_ids"]), -1)

    def _say(self, name: str, values: Array) -> None:
        """Where the shape is what it was, as in most steps, numbers are all that changes."""
        said = self._said.get(name)
        if said is not None and said.shape == values.shape:
            np.copyto(said, values)
            return
        tensor = ov.Tensor(values)
        self._request.set_tensor(name, tensor)
        self._said[name] = tensor.data

    def copy_page(self, source: int, target: int) -> None:
        for cache in self._caches:
            cache[target] = cache[source]


class OutputHead:
    def __init__(self, compiled: Compiled) -> None:
        self._request = compiled.head.create_infer_request()
        self._summing = compiled.totals.create_infer_request()
        self._has_maxima = len(compiled.head.outputs) > 1
        self._heat: Array | None = None
        """Of the rows whose totals were begun and not asked for; None: there are none."""
        self.blocks: RowBlocks | None = None

    def run(self, states: Array, heat: Sequence[float] = ()) -> Array:
        """Rows of logits: a view that the next run overwrites. So are the maxima in the blocks.

        Totals at that heat are begun, and are computed beside whatever is done until they are asked for.
        """
        self._wait()
        self._request.set_input_tensor(0, ov.Tensor(states[:, None]))
        self._request.infer()
        logits: Array = self._request.get_output_tensor(0).data
        if self._has_maxima:
            maxima = self._request.get_output_tensor(1).data
            self.blocks = RowBlocks(maxima, self._totals)
            if worth_totals(sum(map(bool, heat)), len(states)):
                self._begin(maxima.max(axis=1), np.array(heat, np.float32))
        return logits.reshape(len(states), -1)

    def _totals(self, peaks: Array, heat: Array) -> Array:
        # At the same heat they are asked for the same rows, and those are as they came.
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


def _groups(model: ov.Model, said: tuple[str, str]) -> dict[str, Any]:
    """In what groups activations are quantized, where the graph says so."""
    if not model.has_rt_info([*said]):
        return {}
    return {QUANTIZED[-1]: int(model.get_rt_info([*said]).astype(int))}


def _set_windows(model: ov.Model) -> None:
    """Layers that do not see everything, where the graph says so, in the order of the layers."""
    if not model.has_rt_info([*WINDOWS]):
        return
    windows = [int(text) for text in str(model.get_rt_info([*WINDOWS]).astype(str)).split(",")]
    for node in model.get_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            layer = int(node.input_value(_KEY_CACHE).get_node().get_friendly_name().rpartition(".")[2])
            window = ops.constant(np.int32(windows[layer]))
            node.input(_WINDOW).replace_source_output(window.output(0))


def _divide(model: ov.Model) -> tuple[ov.Model, ov.Model]:
    """Cut a graph before its last matrix product."""
    result = model.get_results()[0]
    node = result.input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        if not node.get_input_size():
            raise NotForOpenVino("its last matrix product was not found")
        node = node.input_value(0).get_node()
    states = node.input_value(0)
    parameter = ops.parameter(states.get_partial_shape(), np.float32)
    node.input(0).replace_source_output(parameter.output(0))
    body = ov.Model([ops.result(states)], model.get_parameters(), "body")
    return body, ov.Model([result, *_maxima(result.input_value(0))], [parameter], "head")


def _maxima(logits: ov.Output) -> list[ov.Node]:
    """The largest of each block, where the vocabulary can be divided into blocks."""
    vocabulary = logits.get_partial_shape()[-1].get_length()
    if vocabulary % BLOCK:
        return []
    blocks = ops.reshape(logits, np.array([-1, vocabulary // BLOCK, BLOCK]), special_zero=False)
    return [ops.result(ops.reduce_max(blocks, np.array([-1])))]


def _summing(vocabulary: int) -> ov.Model:
    """Of rows of logits, and a peak and a heat for each: the sum of exp((logit - peak) * heat), in parts."""
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
