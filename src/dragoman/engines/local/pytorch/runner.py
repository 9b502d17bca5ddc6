"""The runner over PyTorch: one step is one forward pass over all rows.

On a GPU a step of only answers is a recorded CUDA graph: hundreds of kernels are launched at once, without
Python. There is one graph for each of a few numbers of rows; steps are padded to these.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.engines.local.pytorch import reference_ops
from dragoman.engines.local.pytorch.adapters import TorchAdapter, read_adapter, shares_tensor
from dragoman.engines.local.pytorch.decoder import ForwardPass
from dragoman.engines.local.pytorch.reference_ops import StepBatch
from dragoman.engines.local.pytorch.training import WeightSource, read_weights
from dragoman.engines.local.pytorch.weights import ModelWeights
from dragoman.engines.local.runner import StepFailed, StepRows, ThreadClock
from dragoman.engines.sampling import Logits
from dragoman.engines.sampling.batched import NOT_FINITE, SamplingBatch
from dragoman.engines.sampling.torch_sampler import DrawKernel, PendingSamples, at, chosen_ids, put
from dragoman.types import Sampling, TokenLogprob

PAGE = 32
_EXTRA_OUTPUTS = 64
_EMBED_ROWS = 512
_PASS, _SPARSE_PASS = {"cuda": 64, "cpu": 16}, 2
"""Fixed cost of a step, in rows. With experts, each row reads its own weights."""
FIXED_ROWS = {"cuda": 256, "cpu": 16}
"""Rows of each product, if a row must not depend on others."""
_FEW, _EVEN = 8, 16
"""Up to `_FEW` rows each power of two has a graph; above, each multiple of `_EVEN`."""


class TorchRunner:
    wants_equal_chunks = False
    prefill_block = 1
    batches_adapters = True
    decode_kv_differs = True
    interruptible = False
    block_stats = None
    page = PAGE

    def __init__(
        self,
        weights: ModelWeights,
        *,
        slots: int,
        context: int,
        pages: int,
        batch: int,
        deterministic: bool = False,
    ) -> None:
        self.slots = slots
        self.context = context
        self.pages = pages
        self.vocabulary = weights.shape.vocabulary
        self.max_rows = batch + slots
        self.max_outputs = slots + _EXTRA_OUTPUTS
        self._device = weights.embedding.device
        self._weights = weights
        # Embeddings have their own pages, behind those of the sequences; the last page is for padding rows.
        each = -(-context // PAGE)
        self._spare = list(range(pages, pages + each))
        operations: Any = reference_ops
        self._draw: DrawKernel | None = None
        if self._device.type == "cuda":
            from dragoman.engines.local.pytorch import kernels

            operations, self._draw = kernels, kernels.GpuDrawKernel()
        shared = weights.shape.heads // weights.shape.kv_heads
        self._rows_at_once = (
            1 << 30 if operations is reference_ops else operations.lines_of(False, shared) // shared
        )
        fixed_rows = FIXED_ROWS[self._device.type] if deterministic else 0
        self._new_forward = partial(
            ForwardPass, weights, operations, pages + each + 1, PAGE, context, fixed_rows
        )
        self._forward: ForwardPass | None = self._new_forward()
        self._loaded = self._forward.adapters
        self.adapters: tuple[str, ...] = ()
        # With experts, the host needs to know their rows in the middle of a step, which cannot be recorded.
        self._records = self._device.type == "cuda" and not weights.shape.experts
        self.step_overhead_rows = _SPARSE_PASS if weights.shape.experts else _PASS[self._device.type]
        self._layout = _Layout(slots, each, pages + each, self._device, self.max_outputs)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        """Graphs by their number of rows and of adapters."""
        self._logits: Tensor | None = None
        self._clock = ThreadClock()

    @property
    def pulse(self) -> int:
        """A counter that changes while a step is computed."""
        return self._clock.count

    @torch.inference_mode()
    def warm_up(self) -> None:
        self._clock.start()
        # Kernels are compiled on first use: for prompts, for sampling, and for answers.
        for value in (False, True):
            rows = StepRows()
            rows.extend(0, 0, [0, 0], [True, True], outcome=value)
            rows.tables[0] = self._spare[:1]
            self.step(rows)
        asked = Sampling(max_tokens=1, temperature=1.0, top_k=2, top_p=0.5)
        self.choose(SamplingBatch([0], [asked], [0.5])).wait()
        if self._records:
            assert self._forward is not None
            for count in reversed(_counts(self.max_outputs)):
                self._forward.logits(self._graph(count, 0).run())

    @torch.inference_mode()
    def step(self, rows: StepRows) -> Logits:
        try:
            states = self._states(rows)
            wanted = np.flatnonzero(rows.outputs)
            if len(wanted) < len(rows):
                states = states[put(wanted, self._device)]
            assert self._forward is not None
            self._logits = self._forward.logits(states).float()
        except torch.cuda.OutOfMemoryError as error:
            raise StepFailed("The GPU has too little memory for this step.") from error
        return cast(Logits, GpuLogits(self._logits, self._draw))

    @torch.inference_mode()
    def choose(self, drawn: SamplingBatch) -> PendingSamples:
        """Sample from rows of the last step. The ids stay on the device, for the next step to use."""
        assert self._logits is not None
        rows = at(self._logits, drawn.rows)
        ids = chosen_ids(rows, drawn, self._draw)
        # The maximum of a row is NaN if any of its numbers is.
        ids = torch.where(torch.isfinite(rows.amax(dim=-1)), ids, NOT_FINITE)
        torch.clamp(ids, min=0, out=self._layout.chosen[: len(ids)])
        return PendingSamples(rows, ids, drawn.asked, self._draw)

    def copy_page(self, source: int, target: int) -> None:
        assert self._forward is not None
        self._forward.copy_page(source, target)

    def interrupt(self) -> None:
        """No effect: a step is short, and runs to its end."""

    def reset(self) -> None:
        """Reset after a failed step: only the KV cache outlives a step, and that is overwritten."""
        self._logits = None

    def rebuild(self) -> None:
        self._graphs.clear()
        adapters = self._loaded.all
        self._forward = self._logits = None
        self._forward = self._new_forward()
        self._loaded = self._forward.adapters
        self._loaded.all = adapters

    def embed(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[float] | None]:
        for prompt in prompts:
            total: NDArray[np.float64] = np.zeros(self._weights.shape.width)
            for start in range(0, len(prompt), _EMBED_ROWS):
                if start:
                    yield None
                total = total + self._sum(prompt[start : start + _EMBED_ROWS], start)
            yield (total / np.linalg.norm(total)).tolist()

    def read_adapter(self, name: str, path: Path) -> Callable[[], None]:
        """Read an adapter from a folder as PEFT saves it."""
        adapter = read_adapter(name, path, self._weights)
        return lambda: self._have([*self._loaded.all, adapter])

    def drop_adapter(self, name: str) -> None:
        self._have([one for one in self._loaded.all if one.name != name])

    def _have(self, adapters: list[TorchAdapter]) -> None:
        self._loaded.all = adapters
        self.adapters = self._loaded.names
        self._graphs = {key: graph for key, graph in self._graphs.items() if not key[1]}

    def read_weights(self, source: WeightSource) -> Callable[[], None]:
        return read_weights(self._weights, source)

    def close(self) -> None:
        self._graphs.clear()
        self._forward = self._logits = None

    @torch.inference_mode()
    def _sum(self, tokens: Sequence[int], start: int) -> NDArray[np.float64]:
        rows = StepRows()
        rows.extend(0, start, tokens, [False] * len(tokens))
        rows.tables[0] = self._spare
        array: NDArray[np.float64] = self._states(rows).double().sum(0).cpu().numpy()
        return array

    def _states(self, rows: StepRows) -> Tensor:
        assert self._forward is not None
        shares = None
        if any(rows.adapters.values()):
            shares = shares_tensor(self._loaded.shares(rows.adapters, rows.slots), self._weights.embedding)
        if self._records and all(rows.is_answer) and len(rows) <= self.max_outputs:
            adapters = 0 if shares is None else len(self._loaded.all)
            graph = self._graph(_count_of(len(rows), self.max_outputs), adapters)
            self._layout.fill(graph.batch, rows)
            if shares is not None and graph.batch.shares is not None:
                graph.batch.shares[: len(rows)] = shares
            return graph.run()[: len(rows)]
        batch = self._layout.of(rows, self._rows_at_once)
        batch.shares = shares
        return self._forward.states(batch)

    def _graph(self, count: int, adapters: int) -> "_Graph":
        if (count, adapters) not in self._graphs:
            assert self._forward is not None
            # Graphs never run at the same time, so they share their memory.
            pool = next((graph.pool for graph in self._graphs.values()), None)
            batch = self._layout.empty(count)
            if adapters:
                batch.shares = self._weights.embedding.new_zeros(count, adapters)
            self._graphs[count, adapters] = _Graph(self._forward, batch, pool)
        return self._graphs[count, adapters]


class GpuLogits:
    """Rows of logits that are copied to the host only when needed."""

    def __init__(self, logits: Tensor, draw: DrawKernel | None) -> None:
        self._logits = logits
        self._draw = draw

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, which: int | slice) -> Logits:
        array: Logits = self._logits[which].cpu().numpy()
        return array

    @torch.inference_mode()
    def report(self, first: int, ids: Sequence[int], top: int) -> list[TokenLogprob]:
        rows = self._logits[first : first + len(ids)]
        asked = Sampling(max_tokens=1, logprobs=top)
        items = PendingSamples(rows, put([*ids], rows.device), [asked] * len(ids), self._draw).wait()
        return [logprob for _, logprob in items if logprob is not None]


class _Graph:
    """A forward pass over a fixed number of rows of answers, recorded once, in the memory of another
    graph.
    """

    def __init__(self, forward: ForwardPass, batch: StepBatch, pool: Any = None) -> None:
        self.batch = batch
        # Kernels are compiled and libraries set up before the recording.
        forward.states(batch)
        torch.cuda.synchronize()
        self._recorded = torch.cuda.CUDAGraph()
        # Other models of this process may compute meanwhile, on their own threads.
        with torch.cuda.graph(self._recorded, pool=pool, capture_error_mode="thread_local"):
            self._states = forward.states(batch)
        self.pool = self._recorded.pool()

    def run(self) -> Tensor:
        self._recorded.replay()
        return self._states


def _counts(most: int) -> list[int]:
    """Return the numbers of rows for which graphs are recorded.

    >>> _counts(40)
    [1, 2, 4, 8, 16, 32, 40]
    """
    few = [1 << power for power in range(_FEW.bit_length()) if 1 << power <= most]
    return sorted({*few, *range(_EVEN, most + 1, _EVEN), most})


def _count_of(rows: int, most: int) -> int:
    """Return the smallest of them that is enough.

    >>> _count_of(3, 40), _count_of(17, 40), _count_of(33, 40)
    (4, 32, 40)
    """
    if rows <= _FEW:
        return min(most, 1 << (rows - 1).bit_length())
    return min(most, -(-rows // _EVEN) * _EVEN)


class _Layout:
    """Converts rows to tensors on the device, with one copy per step."""

    def __init__(self, slots: int, most_pages: int, unread: int, device: torch.device, outputs: int) -> None:
        self._device = device
        self._unread = unread
        self._width = most_pages
        self._tables = np.full((slots, most_pages), unread, np.int32)
        """Pages of each slot, as in the last step."""
        self._known: dict[int, list[int]] = {}
        self.chosen = torch.zeros(outputs, dtype=torch.int64, device=device)
        """The ids sampled last, which rows of the next step may refer to."""

    def of(self, rows: StepRows, rows_at_once: int) -> StepBatch:
        """Create a batch with chunks of prompts and rows of answers between them."""
        slots, array = np.array(rows.slots), np.array(rows.is_answer)
        first = np.concatenate(([True], (slots[1:] != slots[:-1]) | array[1:]))
        begins = [*np.flatnonzero(first).tolist(), len(rows)]
        tables = np.full((len(begins) - 1, self._width), self._unread, np.int32)
        blocks: list[tuple[int, int]] = []
        answers: list[tuple[int, int]] = []
        for number, (start, end) in enumerate(pairwise(begins)):
            pages = rows.tables[rows.slots[start]][: self._width]
            tables[number, : len(pages)] = pages
            if rows.is_answer[start]:
                answers.append((number, 0))
            else:
                blocks += [(number, block) for block in range(0, end - start, rows_at_once)]
        pieces = np.cumsum(first) - 1
        return self._batch(rows.tokens, rows.positions, pieces, begins, tables, blocks, answers)

    def empty(self, count: int) -> StepBatch:
        """Create a batch of padding rows."""
        numbers = np.arange(count + 1)
        tables = np.full((count, self._width), self._unread, np.int32)
        answers = np.stack([numbers[:-1], np.zeros(count, np.int64)], 1)
        none = np.zeros(count, np.int64)
        return self._batch(none, none, numbers[:-1], numbers, tables, [], answers)

    def fill(self, batch: StepBatch, rows: StepRows) -> None:
        """Write rows of answers into a batch created for as many, or more."""
        count, most = len(rows), len(batch.ids)
        for slot in {*rows.slots}:
            self._note(slot, rows.tables[slot])
        begin = _aligned(most)
        values = np.zeros(2 * begin + most * self._width, np.int32)
        values[:count], values[begin : begin + count] = rows.tokens, rows.positions
        tables = values[2 * begin :].reshape(most, self._width)
        tables[:count], tables[count:] = self._tables[rows.slots], self._unread
        # These tensors are the first part of one memory block.
        batch.all[: values.size].copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)

    def _note(self, slot: int, pages: Sequence[int]) -> None:
        known = self._known.get(slot)
        if known is None or known != pages:
            self._known[slot] = [*pages]
            self._tables[slot] = self._unread
            self._tables[slot, : len(pages)] = pages[: self._width]

    def _batch(
        self, ids: Any, positions: Any, pieces: Any, begins: Any, tables: Any, *blocks: Any
    ) -> StepBatch:
        """Copy all columns at once; each tensor is a view of the result."""
        columns = [np.asarray(one, np.int32) for one in (ids, positions, tables, pieces, begins)]
        columns += [np.asarray(one, np.int32).reshape(-1, 2) for one in blocks]
        # Kernels are compiled again for pointers with a different alignment, so all of these are aligned.
        begins = np.cumsum([0, *(_aligned(one.size) for one in columns)]).tolist()
        values = np.zeros(begins[-1], np.int32)
        for begin, one in zip(begins, columns, strict=False):
            values[begin : begin + one.size] = one.reshape(-1)
        everything = put(values, self._device)
        shaped = [
            everything[begin : begin + one.size].view(one.shape)
            for begin, one in zip(begins, columns, strict=False)
        ]
        return StepBatch(everything, self.chosen, *shaped)


def _aligned(count: int) -> int:
    """Round up to a multiple of 16, so that what follows begins at an aligned address."""
    return -(-count // 16) * 16
