"""The runner over llama.cpp: one context whose KV cache is divided between the slots."""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dragoman.engines.local.binding import Batch
from dragoman.engines.local.gguf_model import LlamaModel
from dragoman.engines.local.options import KVDtypeOption
from dragoman.engines.local.runner import AbortCallback, StepFailed, StepInterrupted, StepRows
from dragoman.engines.sampling import Ids, Logits
from dragoman.errors import ModelFileError
from dragoman.types import Adapters

if TYPE_CHECKING:
    from dragoman.engines.local.encoder_cache import EncoderCache

_ABORTED = 2
_PIECES = -1
_POOLING_NONE = 0
_FLASH_WHERE_POSSIBLE, _FLASH_OFF = -1, 0
KVDtype: TypeAlias = Literal["f16", "int8", "bf16"]
# The library's numbers of these types.
_KV_TYPES: Mapping[KVDtype, int] = {"f16": 1, "int8": 8, "bf16": 30}
_INT8_BLOCK = 32
# Rows of logits besides one per slot, for prompts whose log probabilities are requested.
_EXTRA_OUTPUTS = 64
# Rows of an embedding in one step, as answers wait meanwhile. Always the same number, because how a text is
# cut changes the last bits.
_EMBED_ROWS = 32
# Saving and restoring tokens costs more per token than copying a slot's whole KV cache.
_WHOLE_IS_CHEAPER = 4
# Matrix products with separate kernels for few and for many rows use the latter for multiples of this number.
_MANY = 8
# Bytes that may be moved to make sequences adjacent; more would stall the others for too long.
_MOST_SWAPPED = 32 << 20


class KVDtypes(Struct, frozen=True):
    """Data types of the KV cache."""

    keys: KVDtype
    values: KVDtype

    def __str__(self) -> str:
        both = self.keys == self.values
        return f"{self.keys} keys and values" if both else f"{self.keys} keys and {self.values} values"

    def bytes_of(self, token_bytes: int) -> int:
        """Return the bytes of a token that takes `token_bytes` at 16 bits; int8 has a scale for each block
        of 32.
        """
        return token_bytes * sum(17 if kind == "int8" else 32 for kind in (self.keys, self.values)) // 64


BATCH_INVARIANT_TYPES = frozenset({0, 2, 3, 8})
"""Weight types F32, Q4_0, Q4_1 and Q8_0, whose matrix products use the same kernel for any number of rows."""
OWN_KINDS = KVDtypes("f16", "f16")
"""llama.cpp's default data types."""


def kept_kinds(kv_cache: KVDtypeOption, head: int, *, several: bool) -> KVDtypes:
    """Select the data types of the KV cache. `head` is the length of a key; `several`: answers are batched
    and must be bit-identical.

    With int8 keys, attention uses one kernel for all rows, which halves the speed of long prefills.
    """
    if kv_cache == "auto":
        return KVDtypes("int8" if several and head % _INT8_BLOCK == 0 else "f16", "f16")
    return KVDtypes(kv_cache, kv_cache)


class InvariantBatching(Struct, frozen=True):
    """Batching in which the bits of one row do not depend on others.

    Matrix products have one kernel for few rows and another for many, and attention over float16 has three:
    for a single row, for few, and for 64 and more. Their rounding differs. So rows of answers always use the
    same kernel, and rows of prompts another: in multiples of `_MANY`, padded with rows whose results are
    discarded. A prompt that continues an answer therefore computes the answer's tokens again.
    """

    said: int
    """Rows of answers in one batch."""
    prefill_block: int = 1
    """See `Runner.prefill_block`: rows of whole blocks are computed in batches of at least this many, other
    rows in smaller ones.
    """
    alike: bool = False
    """Whether rows of prompts are batched like those of answers."""


_TILED = InvariantBatching(1, prefill_block=64)
_FEW = 3
"""Up to this many rows are computed bit-identically to one. Not for MoE: an expert computes only the rows
routed to it.
"""


class _BatchBuffer:
    """The arrays of a llama_batch, filled through numpy instead of element by element."""

    def __init__(self, rows: int) -> None:
        self.tokens: Ids = np.zeros(rows, np.int32)
        self.positions: Ids = np.zeros(rows, np.int32)
        self.slots: Ids = np.zeros(rows, np.int32)
        self.outputs = np.zeros(rows, np.int8)
        self._counts = np.ones(rows, np.int32)
        # The C API takes one pointer per row to that row's sequence ids; all point into `slots`.
        self._pointers = self.slots.ctypes.data + 4 * np.arange(rows, dtype=np.uint64)
        self.batch = Batch(
            token=self.tokens.ctypes.data,
            pos=self.positions.ctypes.data,
            n_seq_id=self._counts.ctypes.data,
            seq_id=self._pointers.ctypes.data,
            logits=self.outputs.ctypes.data,
        )

    def fill(self, rows: StepRows) -> Batch:
        count = len(rows)
        self.tokens[:count] = rows.tokens
        self.positions[:count] = rows.positions
        self.slots[:count] = rows.slots
        self.outputs[:count] = rows.outputs
        self.batch.n_tokens = count
        return self.batch


class _VectorBatch:
    """A llama_batch of vectors: rows of media, chunk after chunk."""

    def __init__(self, rows: StepRows, chosen: Sequence[int]) -> None:
        slots = dict.fromkeys(rows.slots[row] for row in chosen)
        shown = [rows.media_rows[slot] for slot in slots]
        count = len(chosen)
        self._rows = np.ascontiguousarray(np.concatenate([each.rows for each in shown]))
        several = [each.positions for each in shown if each.positions is not None]
        one = np.array([rows.positions[row] for row in chosen], np.int32)
        self._positions = np.ascontiguousarray(np.concatenate(several, axis=1)) if several else one
        self._slots: Ids = np.array([rows.slots[row] for row in chosen], np.int32)
        self._outputs = np.array([rows.outputs[row] for row in chosen], np.int8)
        self._counts = np.ones(count, np.int32)
        self._pointers = self._slots.ctypes.data + 4 * np.arange(count, dtype=np.uint64)
        self.batch = Batch(
            n_tokens=count,
            embd=self._rows.ctypes.data,
            pos=self._positions.ctypes.data,
            n_seq_id=self._counts.ctypes.data,
            seq_id=self._pointers.ctypes.data,
            logits=self._outputs.ctypes.data,
        )


class LlamaRunner:
    block_stats = None

    def __init__(
        self,
        model: LlamaModel,
        *,
        slots: int,
        context: int,
        batch: int,
        threads: int,
        flash_attention: bool,
        kept: KVDtypes = OWN_KINDS,
        batch_invariant: bool = False,
        pictures: "EncoderCache | None" = None,
    ) -> None:
        """`evenly`: the bits of a row must not depend on the other rows of a step, nor on where a prompt
        was cut.
        """
        self.model = model
        self.pictures = pictures
        self.slots = slots
        self.max_rows = batch + slots
        self.max_outputs = slots + _EXTRA_OUTPUTS
        self.can_truncate = model.rewinds
        tiled = batch_invariant and kept == OWN_KINDS and self.can_truncate
        self.wants_equal_chunks = not tiled
        self.batches_adapters = False
        self.adapters = tuple(model.adapters)
        self._threads = threads
        self._flash = flash_attention
        self._kept = kept
        self._evenly = batch_invariant
        self._ways = _TILED if tiled else None
        self.decode_kv_differs = tiled
        self.prefill_block = _TILED.prefill_block if tiled else 1
        self._library = library = model.library
        self.vocabulary: int = library.vocab_n_tokens(library.model_get_vocab(model.pointer))
        # A chunk may be followed by padding rows.
        self._unread = _MANY if batch_invariant else 0
        self._wanted_context = context
        self._context: int | None = None
        self._embedder: _Embedder | None = None
        self._set_up()
        self.context = min(context, self._room)
        self._buffer = _BatchBuffer(self.max_rows + self._unread)

    def _set_up(self) -> None:
        """Create a context of the library, with an empty KV cache."""
        self._context = self._open(
            self._wanted_context * self.slots,
            self.slots,
            self.max_rows + self._unread,
            self.max_outputs + self._unread,
        )
        # The library rounds up.
        self._room = int(self._library.n_ctx_seq(self._context))
        self._memory = self._library.get_memory(self._context)
        self._adapters: Adapters = ()
        self._beat = AbortCallback(self._library, self._context)

    def warm_up(self) -> None:
        # OpenMP keeps a team of threads for each thread that computes. With a second team it assumes that the
        # cores are overcommitted and puts threads to sleep at every barrier, which costs a third of the
        # speed.
        rows = StepRows()
        rows.add(0, 0, 0)
        self.step(rows)
        self.truncate(0, 0)
        if not self._evenly or self.decode_kv_differs:
            return
        if self.model.mixes or not np.array_equal(self._try(1), self._try(2 * _MANY)):
            self._ways = InvariantBatching(1 if self.model.mixes else _FEW, alike=not self.can_truncate)
            self.decode_kv_differs = True

    def _try(self, together: int) -> Logits:
        """Return the logits after each of some tokens, computed `together` at a time."""
        items = []
        for start in range(0, 2 * _MANY, together):
            rows = StepRows()
            rows.extend(0, start, range(start, start + together), [True] * together)
            items.append(self.step(rows).copy())
        self.truncate(0, 0)
        return np.concatenate(items)

    def step(self, rows: StepRows) -> Logits:
        self._use(next(iter(rows.adapters.values()), ()))
        self._beat.reset()
        if rows.media_rows or self._ways is not None:
            return self._step_apart(rows)
        self._decode(self._buffer.fill(rows), rows)
        return self._found(sum(rows.outputs))

    def _decode(self, batch: Batch, rows: StepRows) -> None:
        code = self._library.decode(self._context, batch)
        if code:
            self._undo(rows)
            if code == _ABORTED:
                raise StepInterrupted
            raise StepFailed(f"llama_decode returned {code}")

    def _step_apart(self, rows: StepRows) -> Logits:
        """Compute a step in several batches, each with tokens or vectors and for one kernel, and collect
        the logits.
        """
        batches = list(_divide(rows, self._ways))
        if len(batches) == 1:
            # The usual case of one client. Collecting several takes longer than sampling.
            self._decode_chosen(rows, batches[0])
            return self._found(sum(rows.outputs))
        wanted = np.flatnonzero(rows.outputs)
        logits: Logits = np.empty((wanted.size, self.vocabulary), np.float32)
        for chosen in batches:
            self._decode_chosen(rows, chosen)
            indices = np.flatnonzero(np.isin(wanted, chosen))
            if indices.size:
                logits[indices] = self._found(indices.size)
        return logits

    def _decode_chosen(self, rows: StepRows, chosen: list[int]) -> None:
        slot = rows.slots[chosen[0]]
        if slot in rows.media_rows:
            self._decode_shown(_VectorBatch(rows, chosen), rows.media_rows[slot].whole, rows)
        elif self._ways is None or self._ways.alike or rows.is_answer[chosen[0]]:
            whole = len(chosen) == len(rows)
            self._decode(self._buffer.fill(rows if whole else rows.take(chosen)), rows)
        else:
            self._decode_many(rows.take(chosen), rows)

    def _found(self, count: int) -> Logits:
        """Return the first rows of logits of the last batch."""
        return _floats(self._library.get_logits(self._context), count, self.vocabulary)

    def _decode_many(self, taken: StepRows, rows: StepRows) -> None:
        """Compute a chunk of a prompt with padding rows behind it. If the context has no room for them, a
        prompt that fills it is computed without.
        """
        count, slot, end = len(taken), taken.slots[-1], taken.positions[-1] + 1
        unread = min(-count % _MANY, self._room - end)
        # Logits are a matrix product as well: of one row of a prompt, or of all.
        all_wanted = count > 1 and all(taken.outputs)
        taken.extend(slot, end, [taken.tokens[-1]] * unread, [all_wanted] * unread)
        self._decode(self._buffer.fill(taken), rows)
        if unread:
            self.truncate(slot, end)

    def _decode_shown(self, batch: _VectorBatch, whole: bool, rows: StepRows) -> None:
        self._library.set_causal_attn(self._context, not whole)
        try:
            self._decode(batch.batch, rows)
        finally:
            self._library.set_causal_attn(self._context, True)

    def truncate(self, slot: int, length: int) -> None:
        self._library.memory_seq_rm(self._memory, slot, length, -1)

    def copy(self, source: int, target: int, length: int) -> None:
        self.truncate(target, 0)
        if self._count(source) > self.context // _WHOLE_IS_CHEAPER or not self._copy_held(source, target):
            # This copies the slot's whole KV cache, whatever its length.
            self._library.memory_seq_cp(self._memory, source, target, -1, -1)
        self.truncate(target, length)

    def _copy_held(self, source: int, target: int) -> bool:
        """Copy only the tokens that a slot holds, through the library's save format."""
        return self._restore(target, self._save(source))

    def swap(self, first: int, second: int) -> bool:
        if not self.can_truncate:
            return False
        size = self._library.state_seq_get_size
        if size(self._context, first) + size(self._context, second) > _MOST_SWAPPED:
            return False
        saved = [(slot, self._count(slot), self._save(slot)) for slot in (first, second)]
        self.truncate(first, 0)
        self.truncate(second, 0)
        for slot, held, state in saved:
            if held and not self._restore(second if slot == first else first, state):
                raise StepFailed("the library did not restore a sequence that it had saved")
        return True

    def _count(self, slot: int) -> int:
        return int(self._library.memory_seq_pos_max(self._memory, slot)) + 1

    def _save(self, slot: int) -> NDArray[np.uint8]:
        state = np.empty(self._library.state_seq_get_size(self._context, slot), np.uint8)
        written = self._library.state_seq_get_data(self._context, state.ctypes.data, state.size, slot)
        return state[:written]

    def _restore(self, slot: int, state: NDArray[np.uint8]) -> bool:
        read: int = self._library.state_seq_set_data(self._context, state.ctypes.data, state.size, slot)
        return read > 0

    @property
    def interruptible(self) -> bool:
        """Whether steps can be interrupted: the remains of one must be truncated, which recurrent models
        cannot.
        """
        return self.can_truncate

    def interrupt(self) -> None:
        if self.can_truncate:
            self._beat.stop()

    def reset(self) -> None:
        """Nothing to do: a failed step leaves only cells of the KV cache, which are truncated when it
        fails.
        """

    def rebuild(self) -> None:
        if self._embedder is not None:
            self._embedder.close()
            self._embedder = None
        if self._context:
            context, self._context = self._context, None
            self._library.free(context)
        self._set_up()

    @property
    def pulse(self) -> int:
        return self._beat.count + (self._embedder.pulse if self._embedder is not None else 0)

    def embed(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[float] | None]:
        # Not before the first vector is requested: then this is the thread that computes and closes.
        if self._embedder is None:
            self._embedder = _Embedder(self)
        yield from self._embedder.run(prompts)

    def close(self) -> None:
        if self._embedder is not None:
            self._embedder.close()
            self._embedder = None
        if self.pictures is not None:
            self.pictures.close()
        if self._context:
            self._library.free(self._context)
            self._context = None

    def _open(self, context: int, sequences: int, batch: int, outputs: int, embeddings: bool = False) -> int:
        params = self._library.context_default_params()
        params.n_ctx = context
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = batch
        params.n_outputs_max = outputs
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k, params.type_v = _KV_TYPES[self._kept.keys], _KV_TYPES[self._kept.values]
        params.flash_attn_type = _FLASH_WHERE_POSSIBLE if self._flash else _FLASH_OFF
        if embeddings:
            params.embeddings = True
            params.pooling_type = _POOLING_NONE
        pointer: int | None = self._library.init_from_model(self.model.pointer, params)
        if not pointer:
            reason = next(reversed(self._library.errors), "is there enough memory?")
            raise ModelFileError(
                f"Cannot allocate {sequences} slots of {context // sequences} tokens ({reason}); "
                "set fewer slots or a shorter context."
            )
        return pointer

    def _use(self, adapters: Adapters) -> None:
        if adapters == self._adapters:
            return
        count = len(adapters)
        pointers = (ctypes.c_void_p * count)(*(self.model.adapters[name] for name, _ in adapters))
        scales = (ctypes.c_float * count)(*(scale for _, scale in adapters))
        self._library.set_adapters_lora(self._context, pointers, count, scales)
        self._adapters = adapters

    def read_adapter(self, name: str, path: Path) -> Callable[[], None]:
        pointer = self.model.read_adapter(name, path)

        def add() -> None:
            self.model.adapters[name] = pointer
            self.adapters = tuple(self.model.adapters)

        return add

    def drop_adapter(self, name: str) -> None:
        # A context keeps the adapters of its last step.
        self._use(())
        self._library.adapter_lora_free(self.model.adapters.pop(name))
        self.adapters = tuple(self.model.adapters)

    def _undo(self, rows: StepRows) -> None:
        """Truncate every slot to its length before the step: parts of a failed step may be in the KV
        cache.
        """
        first: dict[int, int] = {}
        for slot, position in zip(rows.slots, rows.positions, strict=True):
            first.setdefault(slot, position)
        for slot, position in first.items():
            self.truncate(slot, position)


class _Embedder:
    """A second, small context of the same weights whose outputs are hidden states."""

    def __init__(self, runner: LlamaRunner) -> None:
        self._library = runner.model.library
        self._size: int = self._library.model_n_embd(runner.model.pointer)
        self._context = runner._open(runner.context, 1, _EMBED_ROWS, _EMBED_ROWS, embeddings=True)
        self._memory = self._library.get_memory(self._context)
        self._buffer = _BatchBuffer(_EMBED_ROWS)
        self._beat = AbortCallback(self._library, self._context)

    @property
    def pulse(self) -> int:
        return self._beat.count

    def run(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[float] | None]:
        for prompt in prompts:
            self._library.memory_clear(self._memory, False)
            total = np.zeros(self._size, np.float64)
            for start in range(0, len(prompt), _EMBED_ROWS):
                if start:
                    yield None
                total += self._sum(prompt[start : start + _EMBED_ROWS], start)
            yield (total / np.linalg.norm(total)).tolist()

    def close(self) -> None:
        self._library.free(self._context)

    def _sum(self, tokens: Sequence[int], start: int) -> Logits:
        rows = StepRows()
        rows.extend(0, start, tokens, [True] * len(tokens))
        self._beat.reset()
        code = self._library.decode(self._context, self._buffer.fill(rows))
        if code:
            raise StepFailed(f"llama_decode returned {code}")
        states = _floats(self._library.get_embeddings(self._context), len(tokens), self._size)
        total: Logits = states.sum(axis=0)
        return total


def _divide(rows: StepRows, ways: InvariantBatching | None) -> Iterator[list[int]]:
    """Yield the rows of each batch: tokens; media chunks, of which those with non-causal attention are
    separate. If `ways` is set, also few answers per batch, and each prompt in batches of its own.
    """
    numbers: list[int] = []
    others: dict[int, list[int]] = {}
    for row, slot in enumerate(rows.slots):
        shown = rows.media_rows.get(slot)
        if shown is not None:
            others.setdefault(slot if shown.whole else _PIECES, []).append(row)
        elif ways is None or ways.alike or rows.is_answer[row]:
            numbers.append(row)
        else:
            others.setdefault(slot, []).append(row)
    yield from _cut(numbers, max(1, len(numbers)) if ways is None else ways.said)
    for slot, read in others.items():
        if (
            ways is None
            or ways.prefill_block == 1
            or slot in rows.in_blocks
            or slot in rows.media_rows
            or slot == _PIECES
        ):
            yield read
        else:
            yield from _cut(read, ways.prefill_block - _MANY)


def _cut(chosen: list[int], most: int) -> Iterator[list[int]]:
    return (chosen[start : start + most] for start in range(0, len(chosen), most))


@lru_cache(maxsize=64)
def _floats(address: int, rows: int, columns: int) -> Logits:
    """Return a view of the native library's memory; it is usually at the same address, hence the cache."""
    flat = (ctypes.c_float * (rows * columns)).from_address(address)
    return np.ctypeslib.as_array(flat).reshape(rows, columns)
