"""Rules that change a row of logits before an id is chosen from it: masks, biases, penalties, DRY.

Each maker returns a function that edits the row in place, given the ids generated so far.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from dragoman.engines.choosing import Edit, Ids, Logits
from dragoman.types import Samplers, Sampling

# DRY ("don't repeat yourself"): what would go on with a repetition becomes less likely, the longer it is.
#
# For every place before the end, `_lengths` is how many ids up to that place are the same as the ids up to
# the end. One new id is enough to know all of them again: where that id stands, the length is one more than
# it was at the place before, and elsewhere it is 0. So a step costs one pass over the ids, outside of
# Python.


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
        self._lengths[: prompt.size] = _measure_repeats(prompt.tolist(), asked.dry_breakers)
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


def _measure_repeats(ids: list[int], breakers: frozenset[int]) -> list[int]:
    """For each place, how many ids up to it are those up to the end; 0 for the end itself.

    Read backwards these are the lengths of the Z algorithm, which takes linear time.

    >>> _measure_repeats([1, 2, 3, 1, 2], frozenset())
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


# All rules.


_NEVER = np.float32(-np.inf)


def edits(sampling: Sampling, prompt: Ids, vocabulary: int, ends: frozenset[int]) -> list[Edit]:
    """The rules this sampling asks for, in vLLM's order."""
    found: list[Edit] = []
    if sampling.allowed_token_ids is not None:
        found.append(allow(sampling.allowed_token_ids))
    if sampling.bad_words:
        found.append(forbid_words(sampling.bad_words))
    if sampling.min_tokens > 0:
        found.append(forbid_until(ends | sampling.stop_token_ids, sampling.min_tokens))
    if sampling.logit_bias:
        found.append(bias(sampling.logit_bias))
    asked = sampling.samplers
    if asked is not None and asked.penalty_range is not None and "penalties" in asked.order:
        found.append(penalize_recent(sampling, prompt, asked.penalty_range))
    elif asked is None or "penalties" in asked.order:
        found += _penalties(sampling, prompt, vocabulary)
    if asked is not None and asked.dry_multiplier > 0 and "dry" in asked.order:
        found.append(penalize_loops(asked, prompt))
    return found


def _penalties(sampling: Sampling, prompt: Ids, vocabulary: int) -> Iterator[Edit]:
    if sampling.repetition_penalty != 1:
        yield penalize_repetition(sampling.repetition_penalty, prompt, vocabulary)
    if sampling.frequency_penalty or sampling.presence_penalty:
        yield penalize_use(sampling.frequency_penalty, sampling.presence_penalty, vocabulary)


def allow(ids: Collection[int]) -> Edit:
    places = np.fromiter(ids, np.intp, len(ids))

    def edit(row: Logits, output: Sequence[int]) -> None:
        # Few are allowed, mostly: to put them back is quicker than to go through a mask of the others.
        allowed = row[places]
        row.fill(_NEVER)
        row[places] = allowed

    return edit


def forbid_words(words: Sequence[Sequence[int]]) -> Edit:
    """A word's last id is forbidden where the ids before it have just been generated."""
    parts = [(list(word[:-1]), word[-1]) for word in words if word]

    def edit(row: Logits, output: Sequence[int]) -> None:
        for before, last in parts:
            if not before or list(output[-len(before) :]) == before:
                row[last] = _NEVER

    return edit


def forbid_until(ids: Collection[int], length: int) -> Edit:
    """These ids are forbidden until `length` ids have been generated."""
    places = np.fromiter(ids, np.intp, len(ids))

    def edit(row: Logits, output: Sequence[int]) -> None:
        if len(output) < length:
            row[places] = _NEVER

    return edit


def bias(by_id: Mapping[int, float]) -> Edit:
    places = np.fromiter(by_id.keys(), np.intp, len(by_id))
    amounts = np.fromiter(by_id.values(), np.float32, len(by_id))

    def edit(row: Logits, output: Sequence[int]) -> None:
        row[places] += amounts

    return edit


def penalize_repetition(penalty: float, prompt: Ids, vocabulary: int) -> Edit:
    """Ids of the prompt and the output become less likely by a factor."""
    seen = np.zeros(vocabulary, np.bool_)
    seen[prompt] = True
    factor = np.float32(penalty)

    def edit(row: Logits, output: Sequence[int]) -> None:
        if output:
            seen[output[-1]] = True
        places = np.flatnonzero(seen)
        values = row[places]
        row[places] = np.where(values > 0, values / factor, values * factor)

    return edit


def penalize_use(frequency: float, presence: float, vocabulary: int) -> Edit:
    """Ids of the output lose `frequency` for each time they occurred and `presence` once."""
    amounts = np.zeros(vocabulary, np.float32)
    used: set[int] = set()

    def edit(row: Logits, output: Sequence[int]) -> None:
        if output:
            last = output[-1]
            amounts[last] += frequency if last in used else frequency + presence
            used.add(last)
        np.subtract(row, amounts, out=row)

    return edit


def penalize_recent(sampling: Sampling, prompt: Ids, newest: int) -> Edit:
    """All penalties, of the newest ids only: of prompt and output, or of the output for those of use."""
    seen = deque(prompt[-newest:].tolist(), maxlen=newest)
    used: deque[int] = deque(maxlen=newest)
    factor = np.float32(sampling.repetition_penalty)

    def edit(row: Logits, output: Sequence[int]) -> None:
        if output:
            seen.append(output[-1])
            used.append(output[-1])
        places = np.fromiter(set(seen), np.intp)
        values = row[places]
        row[places] = np.where(values > 0, values / factor, values * factor)
        for id_, count in Counter(used).items():
            row[id_] -= np.float32(sampling.presence_penalty + count * sampling.frequency_penalty)

    return edit
