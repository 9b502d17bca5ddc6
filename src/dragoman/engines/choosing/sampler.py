"""From a row of logits to the next id.

The order is vLLM's: allowed ids, bad words, minimum length, bias, penalties, temperature, min-p, typical-p,
top-k, top-p. Reported log probabilities are those of the row as it came from the model.

Nothing sorts the vocabulary: each filter first narrows it to the few ids that can pass.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dragoman.engines.choosing.arrays import Ids, Logits
from dragoman.engines.choosing.edits import Edit, edits
from dragoman.types import Sampling, TokenLogprob

Floats: TypeAlias = NDArray[np.floating]
_BLOCK = 64
# Ids less likely than that, against the likeliest, are seldom in a nucleus, and there are thousands of them.
_SELDOM = 2e-3
_NEVER = np.float32(-np.inf)


class NoTokenLeft(Exception):
    """Masks and filters together leave nothing to choose from."""


class Sampler:
    """The choices of one continuation.

    With a seed they are the same each time the same logits come in: each continuation has a generator of
    its own, made from the seed and its index. The logits themselves may differ in their last bits with the
    other sequences in the step and with where the prompt was cut, so a seed does not promise the same text
    under another load.
    """

    def __init__(
        self, sampling: Sampling, index: int, prompt: Ids, vocabulary: int, ends: frozenset[int]
    ) -> None:
        self._sampling = sampling
        self._edits = edits(sampling, prompt, vocabulary, ends)
        self._random = None if sampling.temperature <= 0 else _generator(sampling.seed, index)

    def add(self, edit: Edit) -> None:
        """One more rule, applied after the others: a constraint's mask, for example."""
        self._edits.append(edit)

    @property
    def takes_largest(self) -> bool:
        """Whether it is the largest logit that decides, and no rule changes any."""
        return self._random is None and not self._edits

    @property
    def plain(self) -> bool:
        """Whether no rule changes the row, so that temperature, min-p, top-k and top-p say it all."""
        return not self._edits and self._sampling.typical_p >= 1

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next draw; 0 where nothing is drawn."""
        return 0.0 if self._random is None else self._random.random()

    def sample(self, row: Logits, output: Sequence[int]) -> int:
        """The next id, given the row for it and the ids generated so far. `row` is left as it is."""
        if self._edits:
            row = row.copy()
            for edit in self._edits:
                edit(row, output)
        if self._random is None:
            best = int(row.argmax())
            if row[best] == _NEVER:
                raise NoTokenLeft
            return best
        return draw(row, self._sampling, self.uniform())

    def report(self, row: Logits, token: int) -> TokenLogprob:
        return logprob(row, token, self._sampling.logprobs or 0)


def draw(row: Logits, sampling: Sampling, uniform: float) -> int:
    """Pick an id by temperature and filters; `uniform` in [0, 1) decides which."""
    peak = row.max()
    if peak == _NEVER:
        raise NoTokenLeft
    ids: Ids | None = None
    if sampling.min_p > 0:
        floor = peak + np.float32(math.log(sampling.min_p) * sampling.temperature)
        ids, row = _narrow(ids, row, (row >= floor).nonzero()[0].astype(np.int32))
    scaled = row - peak
    scaled *= np.float32(1 / sampling.temperature)
    if sampling.typical_p < 1:
        ids, scaled = _narrow(ids, scaled, _typical(scaled, sampling.typical_p))
    if 0 < sampling.top_k < scaled.size:
        ids, scaled = _narrow(ids, scaled, largest(scaled, sampling.top_k))
    weights = np.exp(scaled, out=scaled)
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p)
        weights = weights[kept]
        ids = kept if ids is None else ids[kept]
    place = _pick(weights, uniform)
    return place if ids is None else int(ids[place])


def largest(values: Logits, count: int) -> Ids:
    """The places of the `count` largest values, in no order."""
    blocks = values.size // _BLOCK
    if blocks <= 2 * count:
        return np.argpartition(values, -count)[-count:].astype(np.int32)
    # The count-th largest of the blocks' maxima is not above the count-th largest value. A block is every
    # so-and-so-manieth value, because numpy compares rows faster than neighbours.
    maxima = values[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)
    floor = np.partition(maxima, -count)[-count]
    near = np.flatnonzero(values >= floor).astype(np.int32)
    if near.size == count:
        return near
    chosen: Ids = near[np.argpartition(values[near], -count)[-count:]]
    return chosen


def logprob(row: Logits, token: int, top: int) -> TokenLogprob:
    """The log probability of `token` in `row`, and the `top` most likely ids with theirs."""
    peak = row.max()
    base = float(peak) + math.log(float(np.exp(row - peak).sum(dtype=np.float64)))
    if top <= 0:
        return TokenLogprob(token, float(row[token]) - base)
    places = largest(row, min(top, row.size))
    # Equal values are put in the order of their ids, so that the answer does not depend on the partition.
    places = places[np.lexsort((places, -row[places]))]
    alternatives = tuple((int(i), float(row[i]) - base) for i in places)
    return TokenLogprob(token, float(row[token]) - base, alternatives)


def _narrow(ids: Ids | None, values: Logits, places: Ids) -> tuple[Ids, Logits]:
    return (places if ids is None else ids[places]), values[places]


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """The places of the fewest largest weights that make up `top_p` of the sum; equals are kept together."""
    total = float(weights.sum())
    # What is smaller than this adds up to less than 1 - top_p, however much of it there is.
    least = (1 - top_p) * total / weights.size
    for floor in (max(_SELDOM, least), least):
        near = (weights >= floor).nonzero()[0]
        descending = np.sort(weights[near])[::-1]
        reached = np.cumsum(descending, dtype=np.float64)
        if reached.size and reached[-1] >= top_p * total:
            break
    last = min(int(np.searchsorted(reached, top_p * total)), descending.size - 1)
    kept: Ids = near[weights[near] >= descending[last]].astype(np.int32)
    return kept


def _typical(scaled: Logits, typical_p: float) -> Ids:
    """The places whose information is nearest to the average, until they make up `typical_p`."""
    weights = np.exp(scaled - scaled.max())
    probabilities = weights / weights.sum(dtype=np.float64)
    with np.errstate(divide="ignore"):
        information = -np.log(probabilities)
    possible = np.flatnonzero(probabilities > 0)
    entropy = float((probabilities[possible] * information[possible]).sum())
    order = possible[np.argsort(np.abs(information[possible] - entropy), kind="stable")]
    count = int(np.searchsorted(np.cumsum(probabilities[order]), typical_p)) + 1
    return order[:count].astype(np.int32)


def _pick(weights: Floats, uniform: float) -> int:
    """The place where the running sum of the weights passes `uniform` of the total."""
    if weights.size <= 256:
        reached = weights.cumsum(dtype=np.float64)
        place = int(reached.searchsorted(uniform * reached[-1], side="right"))
        return min(place, int(weights.nonzero()[0][-1]))
    starts = np.arange(0, weights.size, 256)
    blocks = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    target = uniform * blocks[-1]
    block = min(int(np.searchsorted(blocks, target, side="right")), starts.size - 1)
    before = blocks[block - 1] if block else 0.0
    inside = weights[starts[block] : starts[block] + 256]
    place = int(np.searchsorted(np.cumsum(inside, dtype=np.float64), target - before, side="right"))
    if place >= inside.size or not inside[place]:
        # Rounding carried it past the last one that can be chosen.
        place = int(np.flatnonzero(inside)[-1])
    return int(starts[block]) + place


def _generator(seed: int | None, index: int) -> np.random.Generator:
    if seed is None:
        return np.random.Generator(np.random.PCG64())
    return np.random.Generator(np.random.PCG64([seed & (2**64 - 1), index]))
