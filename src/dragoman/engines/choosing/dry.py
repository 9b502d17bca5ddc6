"""DRY ("don't repeat yourself"): what would go on with a repetition becomes less likely, the longer it is.

For every place before the end, `_lengths` is how many ids up to that place are the same as the ids up to the
end. One new id is enough to know all of them again: where that id stands, the length is one more than it was
at the place before, and elsewhere it is 0. So a step costs one pass over the ids, outside of Python.
"""

import math
from collections.abc import Sequence

import numpy as np

from dragoman.engines.choosing.arrays import Edit, Ids, Logits
from dragoman.types import Samplers

_LARGEST = math.log(np.finfo(np.float32).max)


def penalize_loops(asked: Samplers, prompt: Ids) -> Edit:
    """After `a b c a b` the id `c` loses `multiplier * base ** (2 - allowed_length)`."""
    repeats = _Repeats(asked, prompt)

    def edit(row: Logits, output: Sequence[int]) -> None:
        if output:
            repeats.add(output[-1])
        repeats.penalize(row)

    return edit


class _Repeats:
    def __init__(self, asked: Samplers, prompt: Ids) -> None:
        self._asked = asked
        if asked.dry_range:
            prompt = prompt[-asked.dry_range :]
        self._count = prompt.size
        self._ids = np.zeros(2 * prompt.size + 256, np.int32)
        self._ids[: prompt.size] = prompt
        self._lengths = np.zeros(self._ids.size, np.int32)
        self._lengths[: prompt.size] = _repeated(prompt.tolist(), asked.dry_breakers)
        # Above that the penalty is no number any more.
        self._longest = _LARGEST / math.log(asked.dry_base) if asked.dry_base > 1 else math.inf

    def add(self, id_: int) -> None:
        count = self._count
        if count == self._ids.size:
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._lengths = np.concatenate((self._lengths, np.zeros_like(self._lengths)))
        ids, lengths = self._ids[:count], self._lengths[:count]
        if id_ in self._asked.dry_breakers:
            lengths.fill(0)
        elif count:
            same = ids == id_
            longer = np.zeros_like(lengths)
            longer[1:] = lengths[:-1]
            longer += 1
            np.multiply(longer, same, out=lengths)
        self._ids[count] = id_
        self._lengths[count] = 0
        self._count = count + 1

    def penalize(self, row: Logits) -> None:
        asked, count = self._asked, self._count
        start = max(count - asked.dry_range, 0) if asked.dry_range else 0
        lengths = self._lengths[start : count - 1]
        long = np.flatnonzero(lengths >= max(asked.dry_allowed_length, 1))
        if not long.size:
            return
        # What began before the range is as long as the part inside of it.
        known = np.minimum(lengths[long], long + 1)
        longest: dict[int, int] = {}
        for id_, length in zip(self._ids[start + 1 + long].tolist(), known.tolist(), strict=True):
            if length >= asked.dry_allowed_length and id_ not in asked.dry_breakers:
                longest[id_] = max(longest.get(id_, 0), length)
        for id_, length in longest.items():
            power = min(length - asked.dry_allowed_length, self._longest)
            row[id_] -= np.float32(asked.dry_multiplier * asked.dry_base**power)


def _repeated(ids: list[int], breakers: frozenset[int]) -> list[int]:
    """For each place, how many ids up to it are those up to the end; 0 for the end itself.

    Read backwards these are the lengths of the Z algorithm, which takes linear time.

    >>> _repeated([1, 2, 3, 1, 2], frozenset())
    [0, 2, 0, 0, 0]
    """
    back = ids[::-1]
    # A repetition does not go beyond a breaker.
    most = next((at for at, id_ in enumerate(back) if id_ in breakers), len(back))
    lengths = [0] * len(back)
    left = right = 0
    for at in range(1, len(back)):
        length = min(lengths[at - left], right - at) if at < right else 0
        while at + length < len(back) and back[length] == back[at + length]:
            length += 1
        lengths[at] = length
        if at + length > right:
            left, right = at, at + length
    return [min(length, most) for length in reversed(lengths)]
