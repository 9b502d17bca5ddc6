"""The KV cache: its interface for the scheduler, and the implementation for runners with separate slots."""

from abc import ABC, abstractmethod

import numpy as np

from dragoman.engines.local.runner import Runner, SlotRunner
from dragoman.engines.local.sequence import Sequence, Slot
from dragoman.engines.sampling import Ids

# The part that slots and pages share.


WORTH_SHARING = 16
"""Tokens from which a shared prefix is worth waiting for or copying: either costs about as much as
computing this many.
"""


class KVCache(ABC):
    def __init__(self, runner: Runner) -> None:
        self.slots = [Slot(index, runner.context) for index in range(runner.slots)]
        self.idle = len(self.slots)
        """Number of free slots."""
        self.full = False
        """Whether the last allocation failed for lack of memory, so others need not be tried."""

    @property
    def used(self) -> float:
        """Fraction held by running sequences, from 0 to 1; what is only cached counts as free."""
        held = sum(slot.length for slot in self.slots if slot.sequence is not None)
        return held / sum(slot.ids.size for slot in self.slots)

    @abstractmethod
    def allocate(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot; False if it has to wait for memory, or for a prefix that is
        being computed.
        """

    def has(self, slot: Slot | None, length: int) -> bool:
        """Whether a slot has memory for `length` tokens already."""
        return True

    def reserve(self, slot: Slot, length: int) -> bool:
        """Allocate memory for `length` tokens in a slot; return whether there was enough."""
        return True

    def commit(self, slot: Slot) -> None:  # noqa: B027 (a slot's own memory needs no telling)
        """Note that a step has added tokens to a slot, which others may use now."""

    def truncate(self, slot: Slot) -> None:  # noqa: B027 (pages are written over)
        """Remove what was computed behind the slot's tokens."""

    def gather(self) -> bool:
        """Move running sequences next to each other if that pays; return whether one was moved."""
        return False

    def release(self, slot: Slot) -> None:
        """Free a slot. Its tokens stay cached for other sequences."""
        slot.sequence = None
        self.idle += 1

    @abstractmethod
    def discard(self, slot: Slot) -> None:
        """Discard the contents of a slot."""

    @abstractmethod
    def distrust(self, slot: Slot) -> None:
        """Discard the contents of a slot, and the same prefix in the cache: its numbers may be wrong."""

    def clear(self) -> None:
        """Discard the whole cache, while no sequence runs."""
        for slot in self.slots:
            self.discard(slot)

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether a sequence must wait for the job's first continuation, which reports the prompt's log
        probabilities.
        """
        group = sequence.group
        return bool(sequence.index and group.job.sampling.prompt_logprobs is not None and not group.reported)

    def wait_for_prefix(self, sequence: Sequence, length: int) -> bool:
        """Whether to wait for another sequence that is computing a longer prefix of the same prompt.

        Computing the same tokens twice would slow down both.
        """
        namespace = sequence.group.namespace
        for slot in self.slots:
            other = slot.sequence
            if other is None or other.decoding or slot.namespace != namespace:
                continue
            shared = sequence.group.shown.begin(common_prefix_length(sequence.prompt[:-1], other.prompt))
            if shared >= length + WORTH_SHARING and shared > other.computed:
                sequence.held_by, sequence.held_until, length = other, shared, shared
        return sequence.is_blocked()

    def occupy(self, slot: Slot, sequence: Sequence, length: int) -> None:
        slot.length = length
        slot.namespace = sequence.group.namespace
        slot.sequence = sequence
        sequence.slot = slot
        sequence.computed = sequence.cached = length
        self.idle -= 1


def common_prefix_length(a: Ids, b: Ids) -> int:
    """Count the equal leading ids: `common_prefix_length([1, 2, 3], [1, 2, 4])` is 2."""
    size = min(a.size, b.size)
    if size == 0 or a[0] != b[0]:
        return 0
    differs = np.not_equal(a[:size], b[:size])
    first = int(differs.argmax())
    return first if differs[first] else size


# Which slot a sequence gets, and how much of its prompt is already there.
#
# Rules:
# - A prefix is shared only within a namespace: the same adapters, the same salt.
# - The last token of a prompt is always computed again, because its logits are needed.
# - If whole blocks of a prompt are computed differently, tokens behind them are shared only with prompts
#   whose blocks end at the same position, and a block is computed again from its start.
# - A slot whose tokens are mostly of use is continued in place; otherwise they are copied, so that a short
#   common prefix does not cost another conversation its long history.
# - Empty slots are used first, then those idle for longest. Among the longest idle half, a slot next to a
#   running sequence is preferred: sequences in adjacent slots are computed together, others one by one.


class SlotKVCache(KVCache):
    """The KV cache of runners with separate memory for each slot."""

    def __init__(self, runner: SlotRunner) -> None:
        super().__init__(runner)
        self._runner = runner
        self._clock = 0

    def allocate(self, sequence: Sequence) -> bool:
        if self.must_wait(sequence):
            return False
        reusable = self._runner.can_truncate and sequence.prompt_logprobs is None and not sequence.suspect
        source, length = self._match(sequence) if reusable else (None, 0)
        if reusable and self.wait_for_prefix(sequence, length):
            return False
        target, shown = self._target(source, length), sequence.group.shown
        copied = target is not source and source is not None and length >= WORTH_SHARING
        length = length if copied or target is source else 0
        if not shown.request_media(length):
            return False
        if source is not None and copied:
            self._runner.copy(source.index, target.index, shown.position(length))
            target.ids[:length] = sequence.prompt[:length]
        else:
            self._runner.truncate(target.index, shown.position(length))
        self.occupy(target, sequence, length)
        target.blocks_end = self._blocks_end(sequence)
        return True

    def _blocks_end(self, sequence: Sequence) -> int:
        """Return where the whole blocks of a prompt end; 0 without blocks, or if media cut the prompt
        elsewhere. The last token, which is always computed again, is behind them.
        """
        block = self._runner.prefill_block
        return (
            (sequence.sent_length - 1) // block * block if block > 1 and not sequence.group.job.media else 0
        )

    def gather(self) -> bool:
        """Move one running sequence next to the others; return whether one was moved.

        Gaps appear as sequences end, and sequences that are not adjacent are not computed in one pass.
        """
        if len(self.slots) - self.idle < 2:
            return False
        runs = [slot.sequence is not None for slot in self.slots]
        count = sum(runs)
        starts = range(len(runs) - count + 1)
        start = max(starts, key=lambda first: sum(runs[first : first + count]))
        apart = [slot for slot in self.slots if slot.sequence and not start <= slot.index < start + count]
        if not apart:
            return False
        gaps = [slot for slot in self.slots[start : start + count] if slot.sequence is None]
        moved, gap = min(apart, key=_length), min(gaps, key=_length)
        if not self._runner.swap(moved.index, gap.index):
            return False
        moved.index, gap.index = gap.index, moved.index
        self.slots[moved.index], self.slots[gap.index] = moved, gap
        return True

    def truncate(self, slot: Slot) -> None:
        assert slot.sequence is not None
        self._runner.truncate(slot.index, slot.sequence.group.shown.position(slot.length))

    def release(self, slot: Slot) -> None:
        """Free a slot. Its tokens stay cached for other sequences."""
        self._clock += 1
        slot.used = self._clock
        if (length := self._count_shared(slot)) < slot.length and slot.sequence is not None:
            self._runner.truncate(slot.index, slot.sequence.group.shown.position(length))
            slot.length = length
        super().release(slot)

    def discard(self, slot: Slot) -> None:
        """Discard the contents of a slot."""
        self._runner.truncate(slot.index, 0)
        slot.length = 0

    def distrust(self, slot: Slot) -> None:
        for other in self.slots:
            alike = other.namespace == slot.namespace and other.length and slot.length
            if other.sequence is None and alike and other.ids[0] == slot.ids[0]:
                self.discard(other)

    def _match(self, sequence: Sequence) -> tuple[Slot | None, int]:
        """Return the slot with the longest usable prefix of a prompt, preferably an idle one."""
        best, best_length, end = None, 0, self._blocks_end(sequence)
        prompt, group = sequence.prompt[:-1], sequence.group
        for slot in self.slots:
            if slot.length <= 0 or slot.namespace != group.namespace:
                continue
            length = common_prefix_length(prompt, slot.ids[: self._count_shared(slot)])
            length = length if slot.blocks_end == end else min(length, slot.blocks_end, end)
            length = group.shown.begin(
                length - length % self._runner.prefill_block if length < end else length
            )
            if length > best_length or (length == best_length > 0 and slot.sequence is None):
                best, best_length = slot, length
        return best, best_length

    def _count_shared(self, slot: Slot) -> int:
        """Count the tokens of a slot that other sequences can use."""
        if not self._runner.decode_kv_differs or slot.sequence is None:
            return slot.length
        return min(slot.length, slot.sequence.sent_length)

    def _target(self, source: Slot | None, length: int) -> Slot:
        idle = [slot for slot in self.slots if slot.sequence is None]
        if source in idle and (2 * length >= source.length or len(idle) == 1):
            return source
        others = (slot for slot in idle if slot is not source)
        stale = sorted(others, key=lambda slot: (slot.length > 0, slot.used, slot.index))
        for slot in stale[: (len(stale) + 1) // 2]:
            if self._runs(slot.index - 1) or self._runs(slot.index + 1):
                return slot
        return stale[0]

    def _runs(self, index: int) -> bool:
        return 0 <= index < len(self.slots) and self.slots[index].sequence is not None


def _length(slot: Slot) -> int:
    return slot.length
