"""The runner over OpenVINO: one step is one run of the compiled graph over all rows."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino as ov
from numpy.typing import NDArray

from dragoman.engines.hf_tokenizer import HfTokenizer, card_of
from dragoman.engines.local import hardware
from dragoman.engines.local.hardware import numerics, pages_for
from dragoman.engines.local.openvino.adapters import INPUT, LoraAdapter, read_adapters, scales_of
from dragoman.engines.local.openvino.architectures import OpenVinoUnsupported
from dragoman.engines.local.openvino.compiled_graph import (
    CompiledGraph,
    GraphBody,
    OutputHead,
    best_kv_cache,
    compile_graph,
)
from dragoman.engines.local.openvino.conversion_cache import FILE
from dragoman.engines.local.openvino.row_layout import Layout
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.local.os_memory import read_pages_given_back
from dragoman.engines.local.runner import StepInterrupted, StepRows, ThreadClock
from dragoman.engines.model_files import LLAMA_CPP, in_folder
from dragoman.engines.protocol import ModelCard
from dragoman.engines.sampling import Logits
from dragoman.engines.sampling.sampler import BlockStats
from dragoman.errors import BadRequest, ModelFileError

# Rows of logits besides one per sequence, for prompts whose log probabilities are requested.
_EXTRA_OUTPUTS = 64
_EMBED_ROWS = 128
# Cost of reading the weights on a CPU, in rows; an estimate until it is measured. With 16, draft tokens for
# eight answers cost more than they gained. With experts, each row reads its own weights.
_PASS, _SPARSE_PASS = 10, 2
# Numbers of rows that are tested for giving a row the same bits as among the last number of rows.
_TRIED = (1, 2, 3, 4, 6, 8, 12, 16, 32)


class OpenVinoRunner:
    wants_equal_chunks = False
    prefill_block = 1
    batches_adapters = True
    decode_kv_differs = True
    interruptible = False

    def __init__(
        self,
        compiled: CompiledGraph,
        *,
        slots: int,
        context: int,
        pages: int,
        batch: int,
        adapting: "AdapterCompiler | None" = None,
        compile_again: Callable[[], CompiledGraph] | None = None,
    ) -> None:
        """Without `adapting` it has only the adapters of the graph."""
        self.slots = slots
        self.context = context
        self.page = compiled.page
        self.pages = pages
        self.vocabulary = compiled.vocabulary
        self.adapters = self._in_graph = compiled.adapters
        self._adapting = adapting
        self.step_overhead_rows = _SPARSE_PASS if compiled.mixes else _PASS
        self.max_rows = batch + slots
        self.max_outputs = slots + _EXTRA_OUTPUTS
        # Embeddings have their own pages, behind those of the sequences.
        self._spare = list(range(pages, pages + -(-context // self.page)))
        self._layout = Layout(self.page, unread=pages + len(self._spare))
        self.all_pages = pages + len(self._spare) + 1
        self._body: GraphBody | None = GraphBody(compiled, self.all_pages)
        self._head: OutputHead | None = OutputHead(compiled)
        self._stop_warm_up = False
        self._compiled = compiled
        self._compile_again = compile_again
        self._clock = ThreadClock()
        self._closing = threading.Lock()
        self._weights = compiled.weights

    @property
    def block_stats(self) -> BlockStats | None:
        return None if self._head is None else self._head.blocks

    @property
    def pulse(self) -> int:
        """A counter that changes while a step is computed."""
        return self._clock.count

    def warm_up(self) -> None:
        with read_pages_given_back(self._weights):
            self._try_numbers_of_rows()
        self._clock.start()

    def _try_numbers_of_rows(self) -> None:
        for count, more in pairwise(_TRIED):
            if self._stop_warm_up:
                raise StepInterrupted
            # A single row is a step only if it belongs to an answer.
            among_many = self._try(_TRIED[-1], outcome=count == 1)[:count]
            if not np.array_equal(self._try(count, outcome=count == 1), among_many):
                self._layout.least = more
        rows = StepRows()
        rows.add(0, 0, 0)
        rows.tables[0] = self._spare[:1]
        self.step(rows)

    def step(self, rows: StepRows) -> Logits:
        states = self._states(rows)
        wanted = np.flatnonzero(rows.outputs)
        assert self._head is not None
        if not len(wanted):
            return np.empty((0, self.vocabulary), np.float32)
        return self._head.run(states[wanted], rows.heat if len(rows.heat) == len(wanted) else ())

    def copy_page(self, source: int, target: int) -> None:
        assert self._body is not None
        self._body.copy_page(source, target)

    def interrupt(self) -> None:
        """End the warm-up between two of its steps. A step is never cancelled: see `GraphBody`."""
        self._stop_warm_up = True

    def reset(self) -> None:
        """Create new requests, and run two sizes, so that every node of the graph infers its shapes again."""
        self._open_requests(self._compiled)
        for count in (2, 1):
            self._try(count, outcome=False)
        rows = StepRows()
        rows.add(0, 0, 0)
        rows.tables[0] = self._spare[:1]
        self.step(rows)

    def rebuild(self) -> None:
        """Compile the graph again: its nodes have state that no request can reset."""
        if self._compile_again is not None:
            self._compiled = self._compile_again()
            self._in_graph = self._compiled.adapters
        self.reset()

    def _open_requests(self, compiled: CompiledGraph) -> None:
        with self._closing:
            assert self._body is not None
            tensors = self._body.tensors
            self._body = self._head = None
            self._body = GraphBody(compiled, self.all_pages, tensors)
            self._head = OutputHead(compiled)

    def embed(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[float] | None]:
        for prompt in prompts:
            total: Any = 0.0
            for start in range(0, len(prompt), _EMBED_ROWS):
                if start:
                    yield None
                total += self._sum(prompt[start : start + _EMBED_ROWS], start)
            yield (total / np.linalg.norm(total)).tolist()

    def read_adapter(self, name: str, path: Path) -> Callable[[], None]:
        """Add an adapter by compiling the graph again, as adapters are part of it. The KV cache stays."""
        if self._adapting is None:
            raise BadRequest(
                "This model does not support adapters; use a GGUF file.", code="unsupported_model"
            )
        compiled = self._adapting.compiled(self.adapters, name, path)
        # The minimum rows of a step with this graph are measured beside the computing thread.
        trial = OpenVinoRunner(compiled, slots=1, context=compiled.page, pages=1, batch=_TRIED[-1])
        trial.warm_up()
        trial.close()

        def add() -> None:
            with self._closing:
                assert self._body is not None
                self._body = GraphBody(compiled, self.all_pages, self._body.tensors)
                self._compiled = compiled
            self._layout.least = trial._layout.least
            self._in_graph = compiled.adapters
            self.adapters = (*self.adapters, name)

        return add

    def drop_adapter(self, name: str) -> None:
        """Drop an adapter; it stays in the graph until that is compiled the next time."""
        self.adapters = tuple(other for other in self.adapters if other != name)

    def close(self) -> None:
        with self._closing:
            self._body = self._head = None
            self._compile_again = None

    def _sum(self, tokens: Sequence[int], start: int) -> NDArray[np.float64]:
        rows = StepRows()
        rows.extend(0, start, tokens, [False] * len(tokens))
        rows.tables[0] = self._spare
        total: NDArray[np.float64] = self._states(rows).sum(axis=0, dtype=np.float64)
        return total

    def _try(self, count: int, *, outcome: bool) -> NDArray[np.float32]:
        """Return the hidden states of the first rows of a dummy prompt or answer."""
        rows = StepRows()
        rows.extend(0, 0, range(count), [False] * count, outcome=outcome)
        rows.tables[0] = self._spare[:1]
        rows.adapters[0] = tuple((name, 1.0) for name in self._in_graph)
        return self._states(rows)

    def _states(self, rows: StepRows) -> NDArray[np.float32]:
        assert self._body is not None
        inputs, indices = self._layout.of(rows)
        if self._in_graph:
            inputs[INPUT] = np.zeros((len(inputs["input_ids"]), 1, len(self._in_graph)), np.float32)
            inputs[INPUT][indices, 0] = scales_of(rows, self._in_graph)
        return self._body.run(inputs)[indices]


# Creation of runners, also from folders that were exported for OpenVINO.


_CONTEXT = 2048


class AdapterCompiler:
    """Compiles a graph again with other adapters, which are read from their files each time."""

    def __init__(
        self,
        architecture: str,
        files: Mapping[str, str],
        make: Callable[[Sequence[LoraAdapter]], CompiledGraph],
    ) -> None:
        self._architecture = architecture
        self._files = dict(files)
        self._make = make

    def again(self) -> CompiledGraph:
        """Compile the graph with its current adapters."""
        return self._make(read_adapters(self._files, self._architecture))

    def compiled(self, kept: Sequence[str], name: str, path: Path) -> CompiledGraph:
        """Compile the graph with the `kept` adapters and a new one."""
        files = {other: self._files[other] for other in kept} | {name: str(path)}
        try:
            graph = self._make(read_adapters(files, self._architecture))
        except OpenVinoUnsupported as why:
            message = f"OpenVINO does not support this adapter: {why}. The runner llamacpp supports more."
            raise ModelFileError(message) from None
        self._files = files
        return graph


def runner_of(
    graph: Path,
    trained: int,
    options: LocalOptions,
    adapters: Sequence[LoraAdapter] = (),
    architecture: str | None = None,
) -> tuple[OpenVinoRunner, dict[str, str]]:
    """Create a runner and its details. Without an architecture its adapters cannot change."""
    threads = options.threads or hardware.cores()
    kept = best_kv_cache() if options.kv_cache == "auto" else options.kv_cache
    make = partial(_compile_with, graph, threads, kept)
    compiled = make(adapters)
    adapting = None if architecture is None else AdapterCompiler(architecture, options.adapters, make)
    slots, context, pages = pages_for(compiled.page, compiled.page_bytes, trained, options)
    runner = OpenVinoRunner(
        compiled,
        slots=slots,
        context=context,
        pages=pages,
        batch=options.batch,
        adapting=adapting,
        compile_again=partial(make, adapters) if adapting is None else adapting.again,
    )
    version = ov.__version__.split("-")[0]
    return runner, {
        "runner": f"OpenVINO {version}, {kept} keys and values",
        "threads": str(threads),
        "kv_bytes": str(runner.all_pages * compiled.page_bytes),
    }


def _compile_with(graph: Path, threads: int, kv_cache: str, adapters: Sequence[LoraAdapter]) -> CompiledGraph:
    return compile_graph(graph, threads=threads, kv_cache=kv_cache, adapters=adapters)


def folder_graph(folder: Path) -> tuple[Path, int]:
    """Return the graph in a folder, and the context length that the model was trained for."""
    graph = folder / FILE
    if not graph.is_file():
        raise ModelFileError(f"{folder} is a folder without {FILE}; a GGUF file or such a folder is needed.")
    try:
        config: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError):
        config = {}
    return graph, int(config.get("max_position_embeddings") or _CONTEXT)


def files_of(graph: Path) -> list[Path]:
    """Return the files of a graph: itself and its weights."""
    return [graph, graph.with_suffix(".bin")]


def card_and_tokenizer(
    folder: Path, runner: OpenVinoRunner, name: str | None, details: Mapping[str, str]
) -> tuple[ModelCard, HfTokenizer]:
    tokenizer = HfTokenizer(folder, size=runner.vocabulary)
    card = card_of(
        tokenizer,
        name=name or folder.name,
        max_model_len=runner.context,
        slots=runner.slots,
        constrains=True,
        has_samplers=True,
        sampling={**LLAMA_CPP, **in_folder(folder)},
        created=int(time.time()),
        details={"name": folder.name, "slots": str(runner.slots), **details},
    )
    card.numerics = numerics(files_of(folder / FILE), details["runner"])
    return card, tokenizer
