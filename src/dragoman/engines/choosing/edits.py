"""Rules that change a row of logits before an id is chosen from it: masks, biases, penalties.

Each maker returns a function that edits the row in place, given the ids generated so far.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from dragoman.engines.choosing.arrays import Edit, Ids, Logits
from dragoman.engines.choosing.dry import penalize_loops
from dragoman.types import Sampling

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
    if asked is None or "penalties" in asked.order:
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
