"""Drawing an id from a row of logits: temperature, min-p, typical-p, top-k, top-p.

Nearly all of a vocabulary is so unlikely that it decides nothing. So a draw first looks at the likely ids alone,
and keeps account of how much all the others can weigh together at most. Only where that much could
change the outcome is the whole row computed.
"""

import math

import numpy as np

from dragoman.engines.choosing.arrays import Floats, Ids, Logits, Places
from dragoman.types import Sampling

# What all unlikely ids together weigh at most, where the likeliest id weighs 1. With less, more ids count as
# likely; with more, the whole row has to be computed more often.
_REST = 2e-3
_BLOCK = 64
_PICK_BLOCK = 256
_SORTED_AT_ONCE = 512
_NEVER = np.float32(-np.inf)


class NoTokenLeft(Exception):
    """Masks and filters together leave nothing to choose from."""


class _Undecided(Exception):
    """The ids that were left out could change the outcome."""


def draw(row: Logits, sampling: Sampling, uniform: float) -> int:
    """Pick an id by temperature and filters; `uniform` in [0, 1) decides which."""
    peak = row.max()
    if peak == _NEVER:
        raise NoTokenLeft
    ids, rest = _likely(row, float(peak), sampling)
    if rest:
        try:
            return _choose(row, peak, ids, rest, sampling, uniform)
        except _Undecided:
            ids = None
    return _choose(row, peak, ids, 0.0, sampling, uniform)


def _likely(row: Logits, peak: float, sampling: Sampling) -> tuple[Places | None, float]:
    """The ids worth looking at, in order, and what the others weigh at most. None stands for all ids."""
    if sampling.min_p > 0:
        floor = np.float32(peak + math.log(sampling.min_p) * sampling.temperature)
        return (row >= floor).nonzero()[0], 0.0
    if sampling.typical_p < 1:
        return None, 0.0
    floor = np.float32(peak + math.log(_REST / row.size) * sampling.temperature)
    # One less, for rounding must not leave out an id that weighs more.
    likely = row >= np.nextafter(floor, _NEVER)
    if np.count_nonzero(likely) > row.size // 4:
        return None, 0.0
    return likely.nonzero()[0], _REST


def _choose(
    row: Logits, peak: np.float32, ids: Places | None, rest: float, sampling: Sampling, uniform: float
) -> int:
    """Draw from these ids, if others that weigh at most `rest` could not change what comes out."""
    values = row if ids is None else row[ids]
    if sampling.typical_p < 1:
        ids, values = _narrow(ids, values, _typical(values, sampling))
    if 0 < sampling.top_k < row.size:
        if values.size > sampling.top_k:
            ids, values = _narrow(ids, values, np.sort(largest(values, sampling.top_k)))
        elif rest and values.size < sampling.top_k:
            raise _Undecided
        rest = 0.0
    weights = _weights(values, peak, sampling.temperature)
    if sampling.top_p < 1:
        kept, rest = _nucleus(weights, sampling.top_p, rest)
        ids, weights = _narrow(ids, weights, kept)
    place = _pick(weights, uniform, rest)
    return place if ids is None else int(ids[place])


def _narrow(ids: Places | None, values: Logits, places: Places) -> tuple[Places, Logits]:
    return (places if ids is None else ids[places]), values[places]


def _weights(values: Logits, peak: np.float32, temperature: float) -> Logits:
    scaled = values - peak
    scaled *= np.float32(1 / temperature)
    return np.exp(scaled, out=scaled)


def largest(values: Logits, count: int) -> Places:
    """The places of the `count` largest values, in no order."""
    blocks = values.size // _BLOCK
    if blocks <= 2 * count:
        return np.argpartition(values, -count)[-count:]
    # The count-th largest of the blocks' maxima is not above the count-th largest value. A block is every
    # so-and-so-manieth value, because numpy compares rows faster than neighbours.
    maxima = values[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)
    floor = np.partition(maxima, -count)[-count]
    near = (values >= floor).nonzero()[0]
    if near.size == count:
        return near
    return near[np.argpartition(values[near], -count)[-count:]]


def _nucleus(weights: Floats, top_p: float, rest: float) -> tuple[Places, float]:
    """The places of the fewest largest weights that make up `top_p` of the sum; equals are kept together.

    The sum may be greater by up to `rest`. What is kept for certain comes with what else might be, as a weight.
    """
    total = float(weights.sum())
    least, most = top_p * total, top_p * (total + rest)
    above, near = _around(weights, least, most, (1 - top_p) * total / weights.size)
    descending = np.sort(near)[::-1]
    reached = above + descending.cumsum(dtype=np.float64)
    if rest and reached[-1] < most:
        raise _Undecided
    first, last = (min(int(place), reached.size - 1) for place in reached.searchsorted((least, most)))
    kept = (weights >= descending[first]).nonzero()[0]
    if descending[first] == descending[last]:
        return kept, 0.0
    more = weights[weights >= descending[last]]
    return kept, float(more.sum(dtype=np.float64) - weights[kept].sum(dtype=np.float64))


def _around(weights: Floats, least: float, most: float, floor: float) -> tuple[float, Floats]:
    ...
