"""Which of many weights are kept, and which of those is picked.

Nothing sorts a vocabulary: each filter first narrows it to the few that can pass.

Where ids were left out beforehand, `rest` is what they weigh at most: what is found then holds whatever they
weigh, or it is `Undecided`.
"""

import math

import numpy as np
from numpy.typing import NDArray

from dragoman.engines.choosing.arrays import Logits, Places, Weights

_BLOCK = 64
_PICK_BLOCK = 256
_SORTED_AT_ONCE = 512
# What weighs less, against 1 for the likeliest, is seldom in a nucleus, and there may be thousands of it.
_SELDOM = (2e-3, 2e-4, 0.0)


class Undecided(Exception):
    """What was left out could change the outcome."""


def largest(values: Logits, count: int) -> Places:
    """The places of the `count` largest values, in no order."""
    blocks = max(values.size // _BLOCK, 3 * count)
    deep = values.size // blocks
    if deep < 2:
        return np.argpartition(values, -count)[-count:]
    # The count-th largest of the blocks' maxima is not above the count-th largest value. A block is every
    # so-and-so-manieth value, because numpy compares rows faster than neighbours.
    maxima = values[: deep * blocks].reshape(deep, blocks).max(axis=0)
    floor = np.partition(maxima, -count)[-count]
    near: Places = (values >= floor).nonzero()[0]
    if near.size > count:
        near = near[np.argpartition(values[near], -count)[-count:]]
    return near


def nucleus(weights: Weights, top_p: float, rest: float = 0.0) -> tuple[Places, float]:
    """The places of the fewest largest weights that make up `top_p` of the sum; equals are kept together.

    With a rest, those that are kept in any case, and the weight of those that might be kept too.
    """
    total = float(weights.sum())
    least, most = top_p * total, top_p * (total + rest)
    # What is smaller than this adds up to less than 1 - top_p, however much of it there is.
    small = 0.99 * (1 - top_p) * total / weights.size
    for floor in _SELDOM:
        near = (weights >= max(floor, small)).nonzero()[0]
        found = weights[near]
        above, middle = _around(found, least, most)
        descending = np.sort(middle)[::-1]
        reached = descending.cumsum(dtype=np.float64)
        if reached.size and above + reached[-1] >= most:
            break
    else:
        if rest:
            raise Undecided
    edge = descending[min(int(reached.searchsorted(least - above)), reached.size - 1)]
    lowest = descending[min(int(reached.searchsorted(most - above)), reached.size - 1)]
    kept = found >= edge
    if lowest == edge:
        return near[kept], 0.0
    more = found[found >= lowest].sum(dtype=np.float64)
    return near[kept], float(more - found[kept].sum(dtype=np.float64))


def _around(weights: Weights, least: float, most: float) -> tuple[float, Weights]:
    """The weights among which a running sum, from the largest down, gets to `least` and to `most`; before
    them, the sum of the larger ones."""
    above = 0.0
    while weights.size > _SORTED_AT_ONCE:
        larger = weights >= weights.mean()
        upper = weights[larger.nonzero()[0]]
        reached = above + float(upper.sum(dtype=np.float64))
        if not 0 < upper.size < weights.size or least <= reached < most:
            break
        if reached < least:
            above, weights = reached, weights[(~larger).nonzero()[0]]
        else:
            weights = upper
    return above, weights


def typical(weights: Weights, typical_p: float) -> Places:
    """The places whose information is nearest to the average, until they make up `typical_p`, in order."""
    probabilities = weights / np.float32(weights.sum())
    possible = probabilities.nonzero()[0]
    probabilities = probabilities[possible]
    information = -np.log(probabilities)
    entropy = float((probabilities * information).sum(dtype=np.float64))
    distances = np.abs(information - np.float32(entropy))
    for reach in (1.0, 4.0, math.inf):
        near = (distances <= reach).nonzero()[0]
        if probabilities[near].sum(dtype=np.float64) >= typical_p:
            break
    order = near[distances[near].argsort(kind="stable")]
    count = int(probabilities[order].cumsum(dtype=np.float64).searchsorted(typical_p)) + 1
    kept = np.zeros(weights.size, np.bool_)
    kept[possible[order[:count]]] = True
    return kept.nonzero()[0]


def pick(weights: Weights, uniform: float, rest: float = 0.0) -> int:
    """The place where the running sum of the weights passes `uniform` of the total."""
    start = 0
    if weights.size > 2 * _PICK_BLOCK:
        blocks = np.add.reduceat(weights, np.arange(0, weights.size, _PICK_BLOCK)).cumsum(dtype=np.float64)
        target = uniform * float(blocks[-1])
        block = _passing(blocks, target)
        if block:
            start, target = block * _PICK_BLOCK, target - float(blocks[block - 1])
        weights = weights[start : start + _PICK_BLOCK]
        reached = weights.cumsum(dtype=np.float64)
    else:
        reached = weights.cumsum(dtype=np.float64)
        target = uniform * float(reached[-1])
    place = _passing(reached, target)
    if rest and not reached[place] - weights[place] + rest <= target < reached[place] - uniform * rest:
        raise Undecided
    return start + place


def _passing(sums: NDArray[np.float64], target: float) -> int:
    """The first place above `target`; rounding does not carry it past the last one that adds to the sum."""
    return int(min(sums.searchsorted(target, side="right"), sums.searchsorted(sums[-1])))
