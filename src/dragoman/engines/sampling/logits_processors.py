"""Logits processors, which change a row before sampling: masks, biases, penalties, DRY.

Each factory returns a function that returns the changes, given the ids generated so far.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from dragoman.engines.sampling import Ids, Indices, Logits, LogitsChange, LogitsProcessor
from dragoman.types import ExtraSamplers, Sampling

# DRY ("don't repeat yourself"): ids that would continue a repetition become less likely, the longer it is.
#
# For every offset before the end, `_lengths` is how many ids up to that offset equal the ids up to the end.
# One new id is enough to update all of them: where that id occurs, the length is one more than at the offset
# before, and elsewhere it is 0. So a step costs one numpy pass over the ids.


_LARGEST = math.log(np.finfo(np.float32).max)


def penalize_loops(asked: ExtraSamplers, prompt: Ids) -> LogitsProcessor:
    """Create the DRY processor: after `a b c a b` the id `c` loses `multiplier * base ** (2 -
    allowed_length)`.
    """
    repeats = _RepetitionTracker(asked, prompt)

    def edit(output: Sequence[int]) -> Sequence[LogitsChange]:
        if output:
            repeats.add(output[-1])
        return repeats.changes()

    return edit


class _RepetitionTracker:
    def __init__(self, asked: ExtraSamplers, prompt: Ids) -> None:
        self._asked = asked
        if asked.dry_range:
            prompt = prompt[-asked.dry_range :]
        self._count = prompt.size
        self._ids = np.zeros(2 * prompt.size + 256, np.int32)
        self._ids[: prompt.size] = prompt
        self._lengths = np.zeros(self._ids.size, np.int32)
        self._lengths[: prompt.size] = _measure_repeats(prompt.tolist(), asked.dry_breakers)
        # Longer repetitions would overflow the penalty.
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

    def changes(self) -> list[LogitsChange]:
        asked, count = self._asked, self._count
        start = max(count - asked.dry_range, 0) if asked.dry_range else 0
        lengths = self._lengths[start : count - 1]
        long = np.flatnonzero(lengths >= max(asked.dry_allowed_length, 1))
        if not long.size:
            return []
        # A repetition that began before the range counts only its part inside.
        known = np.minimum(lengths[long], long + 1)
        longest: dict[int, int] = {}
        for id_, length in zip(self._ids[start + 1 + long].tolist(), known.tolist(), strict=True):
            if length >= asked.dry_allowed_length and id_ not in asked.dry_breakers:
                longest[id_] = max(longest.get(id_, 0), length)
        powers = [min(length - asked.dry_allowed_length, self._longest) for length in longest.values()]
        return _add([*longest], [-asked.dry_multiplier * asked.dry_base**power for power in powers])


def _measure_repeats(ids: list[int], breakers: frozenset[int]) -> list[int]:
    """For each offset, count how many ids up to it equal those up to the end; 0 for the end itself.

    Read backwards these are the lengths of the Z algorithm, which takes linear time.

    >>> _measure_repeats([1, 2, 3, 1, 2], frozenset())
    [0, 2, 0, 0, 0]
    """
    back = ids[::-1]
    # A repetition does not extend beyond a breaker.
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


# All processors.


_NEVER = -math.inf


def logits_processors(sampling: Sampling, prompt: Ids, ends: frozenset[int]) -> list[LogitsProcessor]:
    """Return the processors that this sampling requests, in vLLM's order."""
    items: list[LogitsProcessor] = []
    if sampling.allowed_token_ids is not None:
        items.append(allow(sampling.allowed_token_ids))
    if sampling.bad_words:
        items.append(forbid_words(sampling.bad_words))
    if sampling.min_tokens > 0:
        items.append(forbid_until(ends | sampling.stop_token_ids, sampling.min_tokens))
    if sampling.logit_bias:
        items.append(bias(sampling.logit_bias))
    asked = sampling.samplers
    if asked is not None and asked.penalty_range is not None and "penalties" in asked.order:
        items.append(penalize_recent(sampling, prompt, asked.penalty_range))
    elif asked is None or "penalties" in asked.order:
        items += _penalties(sampling, prompt)
    if asked is not None and asked.dry_multiplier > 0 and "dry" in asked.order:
        items.append(penalize_loops(asked, prompt))
    return items


def _penalties(sampling: Sampling, prompt: Ids) -> Iterator[LogitsProcessor]:
    if sampling.repetition_penalty != 1:
        yield penalize_repetition(sampling.repetition_penalty, prompt)
    if sampling.frequency_penalty or sampling.presence_penalty:
        yield penalize_use(sampling.frequency_penalty, sampling.presence_penalty)


def apply(row: Logits, changes: Sequence[LogitsChange]) -> None:
    for change in changes:
        values = row[change.ids]
        if change.alone:
            # Few ids are allowed, usually: restoring them is faster than masking all others.
            row.fill(_NEVER)
        else:
            values = change_values(values, [change])
        row[change.ids] = values


def change_values(values: Logits, changes: Sequence[LogitsChange]) -> Logits:
    """Return the changed values of the ids of these changes, which may belong to several rows."""
    scaled = values
    if any(change.factor != 1 for change in changes):
        counts = [change.ids.size for change in changes]
        factors = np.array([change.factor for change in changes], np.float32).repeat(counts)
        scaled = np.where(values > 0, values / factors, values * factors)
    amounts = [
        np.zeros(change.ids.size, np.float32) if change.amounts is None else change.amounts
        for change in changes
    ]
    added: Logits = scaled + np.concatenate(amounts)
    return added


def _add(ids: Collection[int], amounts: Collection[float]) -> list[LogitsChange]:
    if not ids:
        return []
    return [LogitsChange(np.fromiter(ids, np.intp, len(ids)), np.fromiter(amounts, np.float32, len(amounts)))]


def _forbid(ids: Collection[int]) -> list[LogitsChange]:
    return _add(ids, [_NEVER] * len(ids))


def allow(ids: Collection[int]) -> LogitsProcessor:
    changes = [LogitsChange(np.unique(np.fromiter(ids, np.intp, len(ids))), alone=True)]
    return lambda output: changes


def forbid_words(words: Sequence[Sequence[int]]) -> LogitsProcessor:
    """Forbid the last id of each word if the ids before it have just been generated."""
    parts = [(list(word[:-1]), word[-1]) for word in words if word]

    def edit(output: Sequence[int]) -> Sequence[LogitsChange]:
        return _forbid(
            {last for before, last in parts if not before or list(output[-len(before) :]) == before}
        )

    return edit


def forbid_until(ids: Collection[int], length: int) -> LogitsProcessor:
    """Forbid these ids until `length` ids have been generated."""
    changes = _forbid({*ids})
    return lambda output: changes if len(output) < length else []


def bias(by_id: Mapping[int, float]) -> LogitsProcessor:
    changes = _add(by_id.keys(), by_id.values())
    return lambda output: changes


class _SeenTokens:
    """Distinct ids in the order of their first occurrence, with the amount added for each."""

    def __init__(self, ids: Ids) -> None:
        self._count = ids.size
        self._ids: Indices = np.zeros(2 * ids.size + 64, np.intp)
        self._ids[: ids.size] = ids
        self._amounts: Logits = np.zeros(self._ids.size, np.float32)
        self._where = {id_: index for index, id_ in enumerate(ids.tolist())}

    def add(self, id_: int, first: float = 0.0, further: float = 0.0) -> None:
        index = self._where.get(id_)
        if index is not None:
            self._amounts[index] += further
            return
        if self._count == self._ids.size:
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._amounts = np.concatenate((self._amounts, np.zeros_like(self._amounts)))
        self._ids[self._count], self._amounts[self._count] = id_, first
        self._where[id_] = self._count
        self._count += 1

    @property
    def ids(self) -> Indices:
        return self._ids[: self._count]

    @property
    def amounts(self) -> Logits:
        return self._amounts[: self._count]


def penalize_repetition(penalty: float, prompt: Ids) -> LogitsProcessor:
    """Make ids of the prompt and the output less likely by a factor."""
    seen = _SeenTokens(np.unique(prompt))

    def edit(output: Sequence[int]) -> Sequence[LogitsChange]:
        if output:
            seen.add(output[-1])
        return [LogitsChange(seen.ids, factor=penalty)]

    return edit


def penalize_use(frequency: float, presence: float) -> LogitsProcessor:
    """Lower ids of the output by `frequency` for each occurrence and by `presence` once."""
    used = _SeenTokens(np.zeros(0, np.int32))

    def edit(output: Sequence[int]) -> Sequence[LogitsChange]:
        if output:
            used.add(output[-1], -(frequency + presence), -frequency)
        return [LogitsChange(used.ids, used.amounts)]

    return edit


def penalize_recent(sampling: Sampling, prompt: Ids, newest: int) -> LogitsProcessor:
    """Apply all penalties to the newest ids only: of prompt and output, or of the output for frequency and
    presence.
    """
    seen = deque(prompt[-newest:].tolist(), maxlen=newest)
    used: deque[int] = deque(maxlen=newest)

    def edit(output: Sequence[int]) -> Sequence[LogitsChange]:
        if output:
            seen.append(output[-1])
            used.append(output[-1])
        counts = Counter(used)
        lost = [
            -(sampling.presence_penalty + count * sampling.frequency_penalty) for count in counts.values()
        ]
        scaled = LogitsChange(np.fromiter({*seen}, np.intp), factor=sampling.repetition_penalty)
        return [scaled, *_add(counts.keys(), lost)]

    return edit
