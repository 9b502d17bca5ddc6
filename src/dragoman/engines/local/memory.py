"""Where sequences are kept: what the scheduler asks for, and what slots and pages have in common."""

from abc import ABC, abstractmethod

import numpy as np

from dragoman.engines.choosing.arrays import Ids
from dragoman.engines.local.runner import Runner
from dragoman.engines.local.sequence import Sequence, Slot

WORTH_SHARING = 16
"""To wait for a prefix, or to copy one, costs about as much as computing this many tokens."""


class Memory(ABC):
    def __init__(self, runner: Runner) -> None:
        self.slots = [Slot(index, runner.context) for index in range(runner.slots)]
        self.idle = len(self.slots)
        """Slots that are free."""
        self.full = False
        """Whether the last one who was to be placed found no room; then the others need not try."""

    @abstractmethod
    def place(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot, or make it wait: for room, or a prefix that is being computed."""

    def extend(self, slot: Slot, length: int) -> bool:
        """Make room for `length` tokens in a slot; whether there was any."""
        return True

    def written(self, slot: Slot) -> None:  # noqa: B027 (a slot's own memory needs no telling)
        """What a step has added to a slot can be relied on."""

    def gather(self) -> bool:
        """Bring running sequences next to each other where that pays; whether one has moved."""
        return False

    def release(self, slot: Slot) -> None:
        """The sequence has left; its tokens stay, for others to build on."""
        slot.sequence = None
        self.idle += 1

    @abstractmethod
    def forget(self, slot: Slot) -> None:
        """Nothing that a slot got in this step can be relied on."""

    def must_wait(self, sequence: Sequence) -> bool:
        """The first continuation of a job reports about the prompt, in the job's first step."""
        group = sequence.group
        return bool(sequence.index and group.job.sampling.prompt_logprobs is not None and not group.reported)

    def hold(self, sequence: Sequence, length: int) -> bool:
        """Wait for another sequence when it is computing a longer prefix of the same prompt.

        Computing the same tokens twice would slow down both.
        """
        namespace = sequence.group.namespace
        for slot in self.slots:
            other = slot.sequence
            if other is None or other.decoding or slot.namespace != namespace:
                continue
            shared = common(sequence.prompt[:-1], other.prompt)
            if shared >= length + WORTH_SHARING and shared > other.computed:
                sequence.held_by, sequence.held_until, length = other, shared, shared
        return sequence.held()

    def occupy(self, slot: Slot, sequence: Sequence, length: int) -> None:
        slot.length = length
        slot.namespace = sequence.group.namespace
        slot.sequence = sequence
        sequence.slot = slot
        sequence.computed = sequence.cached = length
        self.idle -= 1


def common(a: Ids, b: Ids) -> int:
    """How many leading ids are the same: `common([1, 2, 3], [1, 2, 4])` is 2."""
    size = min(a.size, b.size)
    if size == 0 or a[0] != b[0]:
        return 0
    differs = np.not_equal(a[:size], b[:size])
    first = int(differs.argmax())
    return first if differs[first] else size
