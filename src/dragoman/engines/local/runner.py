"""What the scheduler needs of whatever computes: memory for sequences, rows of logits, a way to stop."""

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dragoman.engines.choosing import Ids, Logits
from dragoman.engines.choosing.sampler import RowBlocks
from dragoman.engines.local.binding import Library
from dragoman.types import Adapters, TokenLogprob


class StepFailed(Exception):
    """One step could not be computed; what its slots held before is not to be relied on."""


class StepInterrupted(Exception):
    """The step was broken off by `interrupt`; nothing of it counts."""


class ShownRows(Struct, frozen=True):
    """Rows of a step that are no tokens but vectors: a piece of a picture, or of a sound."""

    rows: NDArray[np.float32]
    positions: Ids | None
    """All dimensions of each row, where positions have several."""
    whole: bool
    """Whether the rows see each other."""


class Rows:
    """The tokens of one step, as columns. Rows of a slot are in the order of their positions."""

    __slots__ = (
        "adapters",
        "heat",
        "in_blocks",
        "outputs",
        "positions",
        "said",
        "shown",
        "slots",
        "tables",
        "tokens",
    )

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.outputs: list[bool] = []
        self.said: list[bool] = []
        """Whether a token is of an answer or of a prompt: kernels for the two may differ, and so the bits."""
        self.heat: list[float] = []
        """Of each token that was added by itself: at what heat it will be asked what all ids weigh, as they
        come (`RowBlocks`), or 0. A runner may begin with that at once: nobody changes such a row."""
        self.in_blocks: set[int] = set()
        """Slots whose rows are of whole blocks (`Runner.block`)."""
        self.tables: dict[int, Sequence[int]] = {}
        """For runners with pages: those of each slot, in order."""
        self.adapters: dict[int, Adapters] = {}
        """Those of each slot. They are all the same, unless the runner mixes them."""
        self.shown: dict[int, ShownRows] = {}
        """What stands in the place of the tokens of a slot, for runners that see."""

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, slot: int, position: int, token: int, heat: float = 0.0) -> None:
        """One token of an answer, whose logits are wanted."""
        self.tokens.append(token)
        self.positions.append(position)
        self.slots.append(slot)
        self.outputs.append(True)
        self.said.append(True)
        self.heat.append(heat)

    def extend(
        self, slot: int, position: int, tokens: Sequence[int], outputs: Sequence[bool], *, said: bool = False
    ) -> None:
        """A run of tokens from `position` on."""
        count = len(tokens)
        self.tokens.extend(tokens)
        self.positions.extend(range(position, position + count))
        self.slots.extend([slot] * count)
        self.outputs.extend(outputs)
        self.said.extend([said] * count)

    def take(self, chosen: Sequence[int]) -> "Rows":
        """Some of them, in the same order."""
        taken = Rows()
        taken.tokens = [self.tokens[row] for row in chosen]
        taken.positions = [self.positions[row] for row in chosen]
        taken.slots = [self.slots[row] for row in chosen]
        taken.outputs = [self.outputs[row] for row in chosen]
        return taken


class Runner(Protocol):
    """Weights and key-value memory. Used by one thread only, but for `interrupt`."""

    slots: int
    """Sequences that can be computed at the same time, numbered from 0."""
    context: int
    """Tokens that one sequence may have."""
    vocabulary: int
    max_rows: int
    """Tokens in one step."""
    max_outputs: int
    """Rows of logits in one step; at least `slots`."""
    equal_pieces: bool
    """Whether pieces of prompts are computed together only as far as they are equally long."""
    block: int
    """Of a prompt, whole blocks of so many rows are computed in another way than the rows behind them, so
    that these are of no use to a prompt in which they are part of a block; 1 where there is one way. Blocks
    are not cut."""
    adapters: tuple[str, ...]
    mixes_adapters: bool
    """Whether rows of one step may have different ones."""

    @property
    def blocks(self) -> RowBlocks | None:
        """What is known of the last step's logits beside them, where it was found on the way."""

    def warm_up(self) -> None:
        """Read the weights and set up threads, on the thread that will compute, before the first request."""

    def step(self, rows: Rows) -> Logits:
        """Compute one step; one row of logits per wanted output, in order.

        The result is a view that the next step overwrites. Raises StepFailed or StepInterrupted.
        """

    @property
    def interruptible(self) -> bool:
        """Whether `interrupt` ends a running step. Where it does not, the scheduler keeps steps short."""

    def interrupt(self) -> None:
        """From any thread: end the running step early, if there is one and the runner can."""

    def reset(self) -> None:
        """After a failed step: put right what the library may have left in doubt, in milliseconds."""

    def rebuild(self) -> None:
        """After repeated failures: set up everything but the weights again. All slots are empty then."""

    def read_adapter(self, name: str, path: Path) -> Callable[[], None]:
        """From any thread, while steps are computed: what adds the adapter, for the thread that computes.

        Raises ModelFileError or BadRequest for what cannot be one of this runner's.
        """

    def drop_adapter(self, name: str) -> None:
        """Nothing that is computed names it any more."""

    def embed(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[float] | None]:
        """One vector per prompt; None after each piece of work in between."""

    def close(self) -> None: ...


class SlotRunner(Runner, Protocol):
    """Each slot has memory of its own, for `context` tokens."""

    rewinds: bool
    """Whether a slot can be cut back to a prefix. Recurrent models cannot."""
    rereads: bool
    """As `PagedRunner.rereads`; known once it is warm."""

    def keep(self, slot: int, length: int) -> None:
        """Forget all of a slot but what has positions below `length`."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Make `target` hold what `source` has at positions below `length`."""

    def swap(self, first: int, second: int) -> bool:
        """Exchange what two slots hold. False, and nothing done, where that would cost too much."""


@runtime_checkable
class PagedRunner(Runner, Protocol):
    """Memory is in pages, and which of them a slot has is said with each step."""

    page: int
    """Tokens in a page."""
    pages: int
    """How many there are, numbered from 0; enough for a sequence of `context` tokens."""
    rereads: bool
    """Whether a token gets other keys and values in a prompt than in an answer, so that a prompt which goes
    on from an answer has to read that again."""
    pass_rows: int
    """As many rows as a step costs by itself; 0 where guesses at further tokens are not worth a row."""

    def copy_page(self, source: int, target: int) -> None: ...


AnyRunner: TypeAlias = SlotRunner | PagedRunner


@runtime_checkable
class RowsAway(Protocol):
    """Logits on another device, which are fetched when somebody looks at them."""

    def report(self, first: int, ids: Sequence[int], top: int) -> list[TokenLogprob]:
        """How likely each of these ids was, in the rows from the first on."""


@runtime_checkable
class TrainableRunner(Protocol):
    """A runner whose weights can be changed while it serves."""

    def read_weights(self, source: Any) -> Callable[[], None]:
        """From any thread, while steps are computed: what puts them in place, for the thread that computes.

        Raises ModelFileError or BadRequest, with nothing changed, for what is not this model's.
        """


# Whether a step that is being computed gets on, and how to break it off.


_MANY = 2**31 - 1
_ROOM = 128
"""Bytes of a `sem_t`, and more: its size depends on the machine."""


@runtime_checkable
class Pulsing(Protocol):
    """A runner of which can be seen from outside whether a step gets on."""

    @property
    def pulse(self) -> int:
        """A number that changes while a step is computed. From any thread."""


class Beat:
    """Attached to a context of llama.cpp, which asks a C function after each operation whether to go on.

    A Python function would wait for the interpreter lock each time, so it is one of C's own that takes a
    pointer: `sem_trywait` takes one off a semaphore and says 0, for "go on", until there is none left. So
    what is left tells how far the step is, and with nothing left the step ends.
    """

    def __init__(self, library: Library, context: int) -> None:
        # Each takes less than a microsecond: nobody who waits for the interpreter gets it meanwhile.
        self._libc = ctypes.PyDLL(None)
        self._memory = ctypes.create_string_buffer(_ROOM)
        self._left = ctypes.c_int(0)
        # Elsewhere there may be no semaphores without a name. `strlen` is 0 or 1 as well, but does not count.
        self._counts = sys.platform == "linux"
        ask = self._libc.sem_trywait if self._counts else self._libc.strlen
        self.reset()
        library.set_abort_callback(context, ctypes.cast(ask, ctypes.c_void_p), ctypes.addressof(self._memory))

    def reset(self) -> None:
        """A new step begins."""
        self._set(_MANY)

    def stop(self) -> None:
        """From any thread: break off the step that is running, if one is."""
        self._set(0)

    @property
    def count(self) -> int:
        """Operations of this step, as far as anyone can tell. From any thread."""
        if not self._counts:
            return 0
        self._libc.sem_getvalue(self._memory, ctypes.byref(self._left))
        return _MANY - self._left.value

    def _set(self, value: int) -> None:
        if self._counts:
            self._libc.sem_init(self._memory, 0, value)
        else:
            self._memory[0] = b"\0" if value else b"\1"
