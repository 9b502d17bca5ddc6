"""Which slot a sequence gets, and what of its prompt is already there.

Rules of this file:
- A prefix is shared only within a namespace: the same adapters, the same salt.
- The last token of a prompt is always computed again, because its logits are needed.
- A slot whose tokens are mostly of use is continued in place; otherwise they are copied, so that a short
  common prefix does not cost another conversation its long history.
- Empty slots are taken first, then those that have been idle for longest. Among the staler half, one next
  to a running sequence is taken: sequences in adjacent slots are computed together, others one by one.
"""

import numpy as np

from dragoman.engines.choosing.arrays import Ids
from dragoman.engines.local.runner import Runner
from dragoman.engines.local.sequence import Namespace, Sequence, Slot

# A copy costs about as much as computing this many tokens.
_WORTH_A_COPY = 16


class Slots:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._slots = [Slot(index, runner.context) for index in range(runner.slots)]
        self._clock = 0
        self.idle = len(self._slots)

    def place(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot, or make it wait for a prefix that is being computed."""
        group = sequence.group
        if sequence.index and group.job.sampling.prompt_logprobs is not None and not group.reported:
            # The first continuation reports about the prompt, in the job's first step.
            return False
        reusable = self._runner.rewinds and sequence.prompt_logprobs is None
        source, length = self._match(group.prompt, group.namespace) if reusable else (None, 0)
        if reusable and self._hold(sequence, length):
            return False
        target = self._target(source, length)
        if target is source or source is None or length < _WORTH_A_COPY:
            length = length if target is source else 0
            self._runner.keep(target.index, length)
        else:
            self._runner.copy(source.index, target.index, length)
            target.ids[:length] = group.prompt[:length]
        self._occupy(target, sequence, length)
        return True

    def gather(self) -> bool:
        """Bring running sequences next to each other, by one exchange; whether there was one.

        They come apart as some end before others, and what is apart is not computed in one pass.
        """
        runs = [slot.sequence is not None for slot in self._slots]
        count = sum(runs)
        starts = range(len(runs) - count + 1)
        start = max(starts, key=lambda first: sum(runs[first : first + count]))
        apart = [slot for slot in self._slots if slot.sequence and not start <= slot.index < start + count]
        if not apart:
            return False
        gaps = [slot for slot in self._slots[start : start + count] if slot.sequence is None]
        moved, gap = min(apart, key=_length), min(gaps, key=_length)
        if not self._runner.swap(moved.index, gap.index):
            return False
        moved.index, gap.index = gap.index, moved.index
        self._slots[moved.index], self._slots[gap.index] = moved, gap
        return True

    def release(self, slot: Slot) -> None:
        """The sequence has ended; its tokens stay."""
        self._clock += 1
        slot.used = self._clock
        slot.sequence = None
        self.idle += 1

    def forget(self, slot: Slot) -> None:
        """Nothing in this slot can be relied on."""
        self._runner.keep(slot.index, 0)
        slot.length = 0

    def _occupy(self, slot: Slot, sequence: Sequence, length: int) -> None:
        slot.length = length
        slot.namespace = sequence.group.namespace
        slot.sequence = sequence
        sequence.slot = slot
        sequence.computed = sequence.cached = length
        self.idle -= 1

    def _match(self, prompt: Ids, namespace: Namespace) -> tuple[Slot | None, int]:
        """The slot with the longest usable prefix of `prompt`; an idle one where there is a choice."""
        best, best_length = None, 0
        for slot in self._slots:
            if slot.length <= 0 or slot.namespace != namespace:
                continue
            length = common(prompt[:-1], slot.ids[: slot.length])
            if length > best_length or (length == best_length > 0 and slot.sequence is None):
                best, best_length = slot, length
        return best, best_length

    def _hold(self, sequence: Sequence, length: int) -> bool:
        """Wait for another sequence when it is computing a longer prefix of the same prompt.

        Computing the same tokens twice would slow down both.
        """
        group = sequence.group
        for slot in self._slots:
            other = slot.sequence
            if other is None or other.decoding or slot.namespace != group.namespace:
                continue
            shared = common(group.prompt[:-1], other.group.prompt)
            if shared >= length + _WORTH_A_COPY and shared > other.computed:
                sequence.held_by, sequence.held_until, length = other, shared, shared
        return sequence.held()

    def _target(self, source: Slot | None, length: int) -> Slot:
        idle = [slot for slot in self._slots if slot.sequence is None]
        if source in idle and (2 * length >= source.length or len(idle) == 1):
            return source
        stale = sorted((slot for slot in idle if slot is not source), key=_staleness)
        for slot in stale[: (len(stale) + 1) // 2]:
            if self._runs(slot.index - 1) or self._runs(slot.index + 1):
                return slot
        return stale[0]

    def _runs(self, index: int) -> bool:
        return 0 <= index < len(self._slots) and self._slots[index].sequence is not None


def common(a: Ids, b: Ids) -> int:
    """How many leading ids are the same: `common([1, 2, 3], [1, 2, 4])` is 2."""
    size = min(a.size, b.size)
    if size == 0 or a[0] != b[0]:
        return 0
    differs = np.not_equal(a[:size], b[:size])
    first = int(differs.argmax())
    return first if differs[first] else size


def _length(slot: Slot) -> int:
    return slot.length


def _staleness(slot: Slot) -> tuple[bool, int, int]:
    return slot.length > 0, slot.used, slot.index
