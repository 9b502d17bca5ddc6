"""The interface between the scheduler and what computes: memory for sequences, logits, interruption."""

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dragoman.engines.local.binding import Library
from dragoman.engines.sampling import Ids, Logits
from dragoman.engines.sampling.sampler import BlockStats
from dragoman.types import Adapters, TokenLogprob


class StepFailed(Exception):
    """A step could not be computed; the contents of its slots are invalid."""


class StepInterrupted(Exception):
    """The step was stopped by `interrupt`; none of it counts."""


class MediaRows(Struct, frozen=True):
    """Rows of a step that are vectors instead of tokens: a part of an image or audio."""

    rows: NDArray[np.float32]
    positions: Ids | None
    """Positions of each row in all dimensions, if there are several."""
    whole: bool
    """Whether the rows attend to each other."""


class StepRows:
    """The tokens of one step, as columns. Rows of a slot are in the order of their positions."""

    __slots__ = (
        "adapters",
        "heat",
        "in_blocks",
        "is_answer",
        "media_rows",
        "outputs",
        "positions",
        "slots",
        "tables",
        "tokens",
    )

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.outputs: list[bool] = []
        self.is_answer: list[bool] = []
        """Whether a token belongs to an answer or a prompt: kernels for the two may differ, and so the
        bits.
        """
        self.heat: list[float] = []
        """For each token that was added alone: the temperature at which the sampler needs the relative
        probabilities of all ids of an unmodified row (`BlockStats`), or 0. A runner may compute them at
        once.
        """
        self.in_blocks: set[int] = set()
        """Slots whose rows are of whole blocks (`Runner.prefill_block`)."""
        self.tables: dict[int, Sequence[int]] = {}
        """For runners with pages: the pages of each slot, in order."""
        self.adapters: dict[int, Adapters] = {}
        """Adapters of each slot. They are all the same, unless the runner mixes them."""
        self.media_rows: dict[int, MediaRows] = {}
        """Media rows that replace the tokens of a slot, for runners that take media."""

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, slot: int, position: int, token: int, heat: float = 0.0) -> None:
        """Add one token of an answer, whose logits are needed."""
        self.tokens.append(token)
        self.positions.append(position)
        self.slots.append(slot)
        self.outputs.append(True)
        self.is_answer.append(True)
        self.heat.append(heat)

    def extend(
        self,
        slot: int,
        position: int,
        tokens: Sequence[int],
        outputs: Sequence[bool],
        *,
        outcome: bool = False,
    ) -> None:
        """Add consecutive tokens from `position` on."""
        count = len(tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(position, position + count))
        self.slots.extend([slot] * count)
        self.outputs.extend(outputs)
        self.is_answer.extend([outcome] * count)

    def take(self, chosen: Sequence[int]) -> "StepRows":
        """Return some of the rows, in the same order."""
        taken = StepRows()
        taken.tokens = [self.tokens[row] for row in chosen]
        taken.positions = [self.positions[row] for row in chosen]
        taken.slots = [self.slots[row] for row in chosen]
        taken.outputs = [self.outputs[row] for row in chosen]
        return taken


class Runner(Protocol):
    """Weights and KV cache. For one thread only, except `interrupt`."""

    slots: int
    """Sequences that can be computed at the same time, numbered from 0."""
    context: int
    """Maximum tokens of one sequence."""
    vocabulary: int
    max_rows: int
    """Maximum tokens in one step."""
    max_outputs: int
    """Maximum rows of logits in one step; at least `slots`."""
    wants_equal_chunks: bool
    """Whether chunks of prompts are batched only as far as they are equally long."""
    prefill_block: int
    """Rows of a prompt's block. Whole blocks are computed differently from the rows behind them, which are
    thus useless to a prompt in which they belong to a block; 1 without blocks. Blocks are not cut.
    """
    adapters: tuple[str, ...]
    batches_adapters: bool
    """Whether rows of one step may have different adapters."""

    @property
    def block_stats(self) -> BlockStats | None:
        """Statistics of the last step's logits, if the runner computed them along the way."""

    def warm_up(self) -> None:
        """Read the weights and start threads, on the thread that will compute, before the first request."""

    def step(self, rows: StepRows) -> Logits:
        """Compute one step; return one row of logits per requested output, in order.

        The result is a view that the next step overwrites. Raises StepFailed or StepInterrupted.
        """

    @property
    def interruptible(self) -> bool:
        """Whether `interrupt` ends a running step. If not, the scheduler keeps steps short."""

    def interrupt(self) -> None:
        """End the running step early, if there is one and the runner can. From any thread."""

    def reset(self) -> None:
        """Restore a valid state after a failed step, in milliseconds."""

    def rebuild(self) -> None:
        """Recreate everything but the weights, after repeated failures. All slots are empty then."""

    def read_adapter(self, name: str, path: Path) -> Callable[[], None]:
        """Read an adapter while steps are computed; return a function for the computing thread that adds it.
        From any thread.

        Raises ModelFileError or BadRequest for an adapter that does not fit.
        """

    def drop_adapter(self, name: str) -> None:
        """Free an adapter that no job uses any more."""

    def embed(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[float] | None]:
        """Yield one vector per prompt; None after each chunk of work in between."""

    def close(self) -> None: ...


class SlotRunner(Runner, Protocol):
    """A runner with separate memory for each slot, for `context` tokens."""

    can_truncate: bool
    """Whether a slot can be truncated to a prefix. Recurrent models cannot."""
    decode_kv_differs: bool
    """As `PagedRunner.decode_kv_differs`; known after `warm_up`."""

    def truncate(self, slot: int, length: int) -> None:
        """Truncate a slot to the positions below `length`."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the positions below `length` from one slot to another."""

    def swap(self, first: int, second: int) -> bool:
        """Exchange the contents of two slots. False, and nothing done, if that would cost too much."""


@runtime_checkable
class PagedRunner(Runner, Protocol):
    """A runner with pages; each step says which pages its slots have."""

    page: int
    """Tokens in a page."""
    pages: int
    """Number of pages, numbered from 0; enough for a sequence of `context` tokens."""
    decode_kv_differs: bool
    """Whether a token gets different keys and values in a prompt than in an answer, so that a prompt which
    continues an answer has to compute it again.
    """
    step_overhead_rows: int
    """Fixed cost of a step, in rows; 0 if draft tokens are not worth a row."""

    def copy_page(self, source: int, target: int) -> None: ...


AnyRunner: TypeAlias = SlotRunner | PagedRunner


@runtime_checkable
class DeviceLogits(Protocol):
    """Logits on another device, which are copied only when needed."""

    def report(self, first: int, ids: Sequence[int], top: int) -> list[TokenLogprob]:
        """Return how likely each of these ids was, in the rows from the first on."""


@runtime_checkable
class TrainableRunner(Protocol):
    """A runner whose weights can be changed while it serves."""

    def read_weights(self, source: Any) -> Callable[[], None]:
        """Read weights while steps are computed; return a function for the computing thread that installs
        them. From any thread.

        Raises ModelFileError or BadRequest, with nothing changed, for weights that do not fit this model.
        """


# Progress and interruption of a running step.


_MANY = 2**31 - 1
_ROOM = 128
"""Bytes for a `sem_t`, with a margin: its size depends on the machine."""


@runtime_checkable
class HeartbeatRunner(Protocol):
    """A runner whose progress within a step can be observed from outside."""

    @property
    def pulse(self) -> int:
        """A counter that changes while a step is computed. From any thread."""


class ThreadClock:
    """CPU time of the computing thread, for runtimes that do not report their progress within a step.

    Started by that thread, and read from any other.
    """

    _UNIT_NS = 20_000_000

    def __init__(self) -> None:
        self._clock: int | None = None

    def start(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())

    @property
    def count(self) -> int:
        try:
            return 0 if self._clock is None else time.clock_gettime_ns(self._clock) // self._UNIT_NS
        except OSError:
            # The thread has ended.
            return 0


class AbortCallback:
    """An abort callback for a context of llama.cpp, which calls a C function after each operation to ask
    whether to stop.

    A Python function would wait for the GIL each time, so it is a function of libc that takes a pointer:
    `sem_trywait` decrements a semaphore and returns 0, for "continue", until it is at 0. So the semaphore's
    value tells how far the step is, and setting it to 0 ends the step.
    """

    def __init__(self, library: Library, context: int) -> None:
        # These calls take less than a microsecond, so they keep the GIL.
        self._libc = ctypes.PyDLL(None)
        self._memory = ctypes.create_string_buffer(_ROOM)
        self._left = ctypes.c_int(0)
        # Other systems may not have unnamed semaphores. `strlen` returns 0 or 1 as well, but does not count.
        self._counts = sys.platform == "linux"
        ask = self._libc.sem_trywait if self._counts else self._libc.strlen
        self.reset()
        library.set_abort_callback(context, ctypes.cast(ask, ctypes.c_void_p), ctypes.addressof(self._memory))

    def reset(self) -> None:
        """Prepare for a new step."""
        self._set(_MANY)

    def stop(self) -> None:
        """Interrupt the running step, if there is one. From any thread."""
        self._set(0)

    @property
    def count(self) -> int:
        """Operations of this step so far; 0 if unknown. From any thread."""
        if not self._counts:
            return 0
        self._libc.sem_getvalue(self._memory, ctypes.byref(self._left))
        return _MANY - self._left.value

    def _set(self, value: int) -> None:
        if self._counts:
            self._libc.sem_init(self._memory, 0, value)
        else:
            self._memory[0] = b"\0" if value else b"\1"
