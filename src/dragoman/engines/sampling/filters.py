"""Filters over relative probabilities, drawing from them, and chains of samplers.

A filter never sorts a whole vocabulary: it first narrows it to the few ids that can pass. If ids were left
out beforehand, `rest` is an upper bound of their weight: a result then holds whatever their weight is, or
`FullRowNeeded` is raised.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dragoman.engines.sampling import Indices, Logits, RelativeProbs
from dragoman.types import ExtraSamplers, SamplerName, Sampling

_BLOCK = 64
_PICK_BLOCK = 256
_SORTED_AT_ONCE = 512
# Weights below these, relative to 1 for the likeliest, are rarely in a nucleus, and there may be thousands of
# them.
_SELDOM = (2e-3, 2e-4, 0.0)


class FullRowNeeded(Exception):
    """The ids that were left out could change the result."""


def largest(values: Logits, count: int) -> Indices:
    """Return the indices of the `count` largest values, in no order."""
    blocks = max(values.size // _BLOCK, 3 * count)
    deep = values.size // blocks
    if deep < 2:
        return np.argpartition(values, -count)[-count:]
    # The count-th largest of the blocks' maxima is not above the count-th largest value. A block is every
    # n-th value, because numpy compares rows faster than neighbors.
    maxima = values[: deep * blocks].reshape(deep, blocks).max(axis=0)
    floor = np.partition(maxima, -count)[-count]
    near: Indices = (values >= floor).nonzero()[0]
    if near.size > count:
        near = near[np.argpartition(values[near], -count)[-count:]]
    return near


def nucleus(weights: RelativeProbs, top_p: float, rest: float = 0.0) -> tuple[Indices, float]:
    """Return the indices of the fewest largest weights that sum to `top_p` of the total; equal weights are
    kept together.

    With a rest: those that are kept in any case, and the weight of those that might be kept, too.
    """
    total = float(weights.sum())
    least, most = top_p * total, top_p * (total + rest)
    # Weights below this sum to less than 1 - top_p, however many there are.
    small = 0.99 * (1 - top_p) * total / weights.size
    for floor in _SELDOM:
        near = (weights >= max(floor, small)).nonzero()[0]
        array = weights[near]
        above, middle = _around(array, least, most)
        descending = np.sort(middle)[::-1]
        reached = descending.cumsum(dtype=np.float64)
        if reached.size and above + reached[-1] >= most:
            break
    else:
        if rest:
            raise FullRowNeeded
    edge = descending[min(int(reached.searchsorted(least - above)), reached.size - 1)]
    lowest = descending[min(int(reached.searchsorted(most - above)), reached.size - 1)]
    kept = array >= edge
    if lowest == edge:
        return near[kept], 0.0
    more = array[array >= lowest].sum(dtype=np.float64)
    return near[kept], float(more - array[kept].sum(dtype=np.float64))


def _around(weights: RelativeProbs, least: float, most: float) -> tuple[float, RelativeProbs]:
    """Return the weights among which a descending running sum reaches `least` and `most`, and before them
    the sum of the larger ones.
    """
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


def typical(weights: RelativeProbs, typical_p: float) -> Indices:
    """Return the indices whose information is nearest to the average, until they sum to `typical_p`, in
    order.
    """
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


def pick(weights: RelativeProbs, uniform: float, rest: float = 0.0) -> int:
    """Return the index at which the running sum of the weights passes `uniform` of the total."""
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
    index = _passing(reached, target)
    if rest and not reached[index] - weights[index] + rest <= target < reached[index] - uniform * rest:
        raise FullRowNeeded
    return start + index


def _passing(sums: NDArray[np.float64], target: float) -> int:
    """Return the first index above `target`; rounding does not carry it past the last one that adds to the
    sum.
    """
    return int(min(sums.searchsorted(target, side="right"), sums.searchsorted(sums[-1])))


# Samplers in the requested order.
#
# The default samplers have a faster path (`sampler.draw`), which skips unlikely ids. Here every id is a
# candidate at first, and each sampler narrows the candidates of the one before, or changes their
# probabilities. Names and semantics are those of llama.cpp and text-generation-webui.


Chance: TypeAlias = Callable[[], float]
"""Return the next random number in [0, 1)."""
_COLDEST = 1e-6
_ESTIMATED_FROM = 100
"""Candidates from which mirostat 1 estimates how steeply probabilities fall."""


class Candidates:
    """Ids that may still be sampled, in order, with their logits. There is always at least one."""

    __slots__ = ("ids", "logits")

    def __init__(self, row: Logits) -> None:
        self.ids: Indices = np.flatnonzero(row > -np.inf)
        self.logits = row[self.ids].astype(np.float64)

    def weights(self) -> RelativeProbs:
        """Return the probabilities relative to the likeliest."""
        weights: RelativeProbs = np.exp(self.logits - self.logits.max()).astype(np.float32)
        return weights

    def probabilities(self) -> NDArray[np.float64]:
        weights = np.exp(self.logits - self.logits.max())
        probabilities: NDArray[np.float64] = weights / weights.sum()
        return probabilities

    def keep(self, indices: Indices) -> None:
        self.ids, self.logits = self.ids[indices], self.logits[indices]


class SamplerChain:
    """The sampler chain of one continuation; mirostat keeps the surprise of earlier draws."""

    def __init__(self, sampling: Sampling, asked: ExtraSamplers, vocabulary: int) -> None:
        self._sampling = sampling
        self._asked = asked
        self._vocabulary = vocabulary
        self._surprise = 2 * asked.mirostat_tau
        """Mirostat's maximum surprise of a candidate, in bits."""

    def draw(self, row: Logits, chance: Chance) -> int:
        left = Candidates(row)
        order: tuple[SamplerName, ...] = (
            ("smoothing", "temperature") if self._asked.mirostat else self._asked.order
        )
        for name in order:
            if name in _STEPS and left.ids.size > 1:
                _STEPS[name](left, self._sampling, self._asked, chance)
        if self._asked.mirostat:
            self._narrow_by_surprise(left)
        probabilities = left.probabilities()
        index = pick(probabilities.astype(np.float32), chance())
        if self._asked.mirostat:
            observed = -math.log2(max(probabilities[index], 1e-30))
            self._surprise -= self._asked.mirostat_eta * (observed - self._asked.mirostat_tau)
        return int(left.ids[index])

    def _narrow_by_surprise(self, left: Candidates) -> None:
        if self._asked.mirostat == 1:
            _top_k(left, self._estimated_count(left))
            return
        probabilities = left.probabilities()
        kept = np.flatnonzero(probabilities >= 2.0**-self._surprise)
        left.keep(kept if kept.size else np.array([probabilities.argmax()]))

    def _estimated_count(self, left: Candidates) -> int:
        """Estimate how many candidates have at most the target surprise, if probabilities follow Zipf's
        law.
        """
        likeliest = np.sort(left.probabilities())[::-1][:_ESTIMATED_FROM]
        if likeliest.size < 2 or likeliest[-1] <= 0:
            return 1
        ranks = np.log(np.arange(2, likeliest.size + 1) / np.arange(1, likeliest.size))
        falls = np.log(likeliest[:-1] / likeliest[1:])
        steepness = float((ranks * falls).sum() / (ranks * ranks).sum())
        excess = steepness - 1
        if abs(excess) < 1e-6 or steepness <= 0:
            return left.ids.size
        # In logarithms, because the number overflows if probabilities hardly fall.
        share = excess / -math.expm1(-excess * math.log(self._vocabulary))
        count = (math.log(share) + self._surprise * math.log(2)) / steepness
        return max(1, math.ceil(math.exp(min(count, math.log(left.ids.size)))))


def _top_k(left: Candidates, count: int) -> None:
    if 0 < count < left.ids.size:
        left.keep(np.sort(largest(left.logits.astype(np.float32), count)))


def _min_p(left: Candidates, sampling: Sampling, asked: ExtraSamplers, chance: Chance) -> None:
    if sampling.min_p > 0:
        left.keep(np.flatnonzero(left.weights() >= np.float32(sampling.min_p)))


def _top_p(left: Candidates, sampling: Sampling, asked: ExtraSamplers, chance: Chance) -> None:
    if sampling.top_p < 1:
        left.keep(nucleus(left.weights(), sampling.top_p)[0])


def _typical(left: Candidates, sampling: Sampling, asked: ExtraSamplers, chance: Chance) -> None:
    if sampling.typical_p < 1:
        left.keep(typical(left.weights(), sampling.typical_p))


def _top_n_sigma(left: Candidates, sampling: Sampling, asked: ExtraSamplers, chance: Chance) -> None:
    """Keep logits within a number of standard deviations of the largest."""
    if asked.top_n_sigma > 0:
        floor = left.logits.max() - asked.top_n_sigma * left.logits.std()
        left.keep(np.flatnonzero(left.logits >= floor))


def _top_a(left: Candidates, sampling: Sampling, asked: ExtraSamplers, chance: Chance) -> None:
    """Keep probabilities of at least `top_a` times the square of the largest."""
    if asked.top_a > 0:
        probabilities = left.probabilities()
        most = probabilities.max()
        left.keep(np.flatnonzero(probabilities >= min(asked.top_a * most * most, most)))


def _tfs(left: Candidates, sampling: Sampling, asked: ExtraSamplers, chance: Chance) -> None:
    """Cut off the tail where the curve of probabilities has become flat."""
    if asked.tfs >= 1 or left.ids.size < 3:
        return
    probabilities = left.probabilities()
    order = np.argsort(-probabilities, kind="stable")
    bends = np.abs(np.diff(probabilities[order], 2))
    total = bends.sum()
    if total <= 0:
        return
    count = max(1, int((bends.cumsum() / total).searchsorted(asked.tfs, side="right")))
    left.keep(np.sort(order[:count]))


def _xtc(left: Candidates, sampling: Sampling, asked: ExtraSamplers, chance: Chance) -> None:
    """Sometimes drop all candidates above the threshold except the least likely of them."""
    if asked.xtc_probability <= 0 or asked.xtc_threshold > 0.5 or chance() >= asked.xtc_probability:
        return
    probabilities = left.probabilities()
    above = np.flatnonzero(probabilities >= asked.xtc_threshold)
    if above.size > 1:
        least = above[probabilities[above].argmin()]
        out = np.zeros(probabilities.size, np.bool_)
        out[above] = True
        out[least] = False
        left.keep(np.flatnonzero(~out))


def _smoothing(left: Candidates, sampling: Sampling, asked: ExtraSamplers, chance: Chance) -> None:
    """Square the distances to the largest logit: near ones become nearer, far ones further."""
    if asked.smoothing_factor > 0:
        below = left.logits - left.logits.max()
        square, cube = (3 - asked.smoothing_curve) / 2, (asked.smoothing_curve - 1) / 2
        left.logits = asked.smoothing_factor * (cube * below**3 - square * below**2)


def _temperature(left: Candidates, sampling: Sampling, asked: ExtraSamplers, chance: Chance) -> None:
    """Apply the temperature; with a range, it rises with the model's uncertainty."""
    temperature = sampling.temperature
    if asked.dynatemp_range > 0:
        low, high = max(temperature - asked.dynatemp_range, 0), temperature + asked.dynatemp_range
        probabilities = left.probabilities()
        information = -np.log(np.maximum(probabilities, 1e-30))
        uncertain = float((probabilities * information).sum()) / math.log(probabilities.size)
        temperature = low + (high - low) * uncertain**asked.dynatemp_exponent
    left.logits = left.logits / max(temperature, _COLDEST)


_STEPS: dict[SamplerName, Callable[[Candidates, Sampling, ExtraSamplers, Chance], None]] = {
    "smoothing": _smoothing,
    "temperature": _temperature,
    "top_n_sigma": _top_n_sigma,
    "top_a": _top_a,
    "tfs": _tfs,
    "min_p": _min_p,
    "typical_p": _typical,
    "top_k": lambda left, sampling, asked, chance: _top_k(left, sampling.top_k),
    "top_p": _top_p,
    "xtc": _xtc,
}
"""Penalties and DRY are processors for the whole row, and come before all of these
(`logits_processors.py`).
"""
