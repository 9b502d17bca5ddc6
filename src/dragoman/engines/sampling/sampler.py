"""Sampling of the next id from a row of logits.

The order is vLLM's: allowed ids, bad words, minimum length, bias, penalties, temperature, min-p, typical-p,
top-k, top-p. Another order, and samplers beyond these, are in `filters.py`. Reported log probabilities are
those of the model's unmodified row.

Nearly all of a vocabulary is too unlikely to affect a draw. So a draw first looks at the likely ids alone,
with an upper bound for the weight of all others. The whole row is computed only if that bound could change
the result. Either way the id is the one that the whole row gives.
"""

import math
import threading
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dragoman.engines.sampling import (
    Ids,
    Indices,
    Logits,
    LogitsChange,
    LogitsProcessor,
    RelativeProbs,
    scratch,
)
from dragoman.engines.sampling.filters import FullRowNeeded, SamplerChain, largest, nucleus, pick, typical
from dragoman.engines.sampling.logits_processors import apply, logits_processors
from dragoman.engines.steps import seed_of
from dragoman.types import Sampling, TokenLogprob

# Upper bound for the total weight of the unlikely ids, relative to 1 for the likeliest id. With less, more
# ids count as likely; with more, the whole row is needed more often.
_REST = 1e-2
# If more than one in this many ids is likely, computing the whole row takes no longer.
_MANY = 32
# Lower temperatures change nothing, and 1 / temperature stays finite.
COLDEST = 1e-30
_NEVER = np.float32(-np.inf)
_AT_ONCE = 32


class NoTokenLeft(Exception):
    """Masks and filters together forbid every id."""


class Sampler:
    """The sampler of one continuation.

    With a seed it draws the same ids whenever the same logits come in: each continuation has its own
    generator, created from the seed and its index. The logits themselves may differ in their last bits with
    the other sequences in the step and with where the prompt was cut, so a seed does not guarantee the same
    text under another load.
    """

    def __init__(
        self, sampling: Sampling, index: int, prompt: Ids, vocabulary: int, ends: frozenset[int]
    ) -> None:
        self._sampling = sampling
        self._edits = logits_processors(sampling, prompt, ends)
        self._mask: Callable[[Logits], None] | None = None
        self._uniforms: list[float] = []
        """Random numbers drawn in advance, the next one last."""
        self._random = None if sampling.temperature <= 0 else _generator(sampling.seed, index)
        asked = sampling.samplers
        self._ordered = None if asked is None else SamplerChain(sampling, asked, vocabulary)

    def add(self, edit: LogitsProcessor) -> None:
        """Add a processor, applied after the others."""
        self._edits.append(edit)

    def set_mask(self, mask: Callable[[Logits], None]) -> None:
        """Set a constraint's mask. It is applied after all processors, so that none of them re-allows a
        forbidden id.
        """
        self._mask = mask

    @property
    def is_pure_greedy(self) -> bool:
        """Whether the result is simply the largest logit of the unmodified row."""
        return self._random is None and not self.has_changes

    @property
    def has_changes(self) -> bool:
        """Whether anything changes the row."""
        return bool(self._edits) or self._mask is not None

    @property
    def has_standard_filters(self) -> bool:
        """Whether temperature, min-p, top-k and top-p are all that is needed after the changes."""
        return self._sampling.typical_p >= 1 and self._ordered is None

    def changes(self, output: Sequence[int]) -> list[LogitsChange]:
        """Return the processors' next changes. They run once for each id, either here or in `sample`."""
        return [change for edit in self._edits for change in edit(output)]

    def uniform(self) -> float:
        """Return the number in [0, 1) that decides the next draw; 0 for greedy sampling."""
        if self._random is None:
            return 0.0
        if not self._uniforms:
            # One by one the numbers would be the same, but slower.
            self._uniforms = self._random.random(_AT_ONCE)[::-1].tolist()
        return self._uniforms.pop()

    def return_uniforms(self, uniforms: Sequence[float]) -> None:
        """Return the last random numbers, which were not used, to be drawn again."""
        if self._random is not None:
            self._uniforms += reversed(uniforms)

    def sample(self, row: Logits, output: Sequence[int]) -> int:
        """Sample the next id, given its row and the ids generated so far. `row` is not changed."""
        if self.has_changes:
            own = scratch(row.size, "row")
            np.copyto(own, row)
            row = own
            apply(row, self.changes(output))
            if self._mask is not None:
                self._mask(row)
        if self._random is None:
            best = int(row.argmax())
            if row[best] == _NEVER:
                raise NoTokenLeft
            return best
        if self._ordered is not None:
            if row.max() == _NEVER:
                raise NoTokenLeft
            return self._ordered.draw(row, self._random.random)
        return draw(row, self._sampling, self.uniform())

    def report(self, row: Logits, token: int) -> TokenLogprob:
        return logprob(row, token, self._sampling.logprobs or 0)


def draw(row: Logits, sampling: Sampling, uniform: float) -> int:
    """Draw an id by temperature and filters; `uniform` in [0, 1) decides which."""
    peak = row.max()
    if peak == _NEVER:
        raise NoTokenLeft
    ids, rest = _likely(row, float(peak), sampling)
    if rest:
        try:
            return _choose(row, peak, ids, rest, sampling, uniform)
        except FullRowNeeded:
            ids = None
    return _choose(row, peak, ids, 0.0, sampling, uniform)


def _likely(row: Logits, peak: float, sampling: Sampling) -> tuple[Indices | None, float]:
    """Return the ids to consider, in order, and an upper bound for the weight of the others. None means
    all ids.
    """
    if sampling.min_p > 0:
        floor = np.float32(peak + math.log(sampling.min_p) * sampling.temperature)
        return (row >= floor).nonzero()[0], 0.0
    if sampling.top_k > 0 or sampling.typical_p < 1:
        return None, 0.0
    floor = np.float32(peak + math.log(_REST / row.size) * sampling.temperature)
    # Rounded down, so that no larger weight is left out.
    likely = row >= np.nextafter(floor, _NEVER)
    if np.count_nonzero(likely) > row.size // _MANY:
        return None, 0.0
    return likely.nonzero()[0], _REST


def _choose(
    row: Logits, peak: np.float32, ids: Indices | None, rest: float, sampling: Sampling, uniform: float
) -> int:
    """Draw from these ids, if the others, of at most `rest` in weight, cannot change the result."""
    values = row if ids is None else row[ids]
    if sampling.typical_p < 1:
        indices = typical(_weights(values, peak, sampling.temperature), sampling.typical_p)
        ids, values = _narrow(ids, values, indices)
    if 0 < sampling.top_k < values.size:
        ids, values = _narrow(ids, values, np.sort(largest(values, sampling.top_k)))
    weights = _weights(values, peak, sampling.temperature)
    if sampling.top_p < 1:
        kept, rest = nucleus(weights, sampling.top_p, rest)
        ids, weights = _narrow(ids, weights, kept)
    index = pick(weights, uniform, rest)
    return index if ids is None else int(ids[index])


def _weights(values: Logits, peak: np.float32, temperature: float) -> RelativeProbs:
    """Return the probabilities relative to the likeliest."""
    weights = np.subtract(values, peak, out=scratch(values.size))
    if temperature != 1:
        weights *= np.float32(1 / max(temperature, COLDEST))
    return np.exp(weights, out=weights)


def _narrow(ids: Indices | None, values: Logits, indices: Indices) -> tuple[Indices, Logits]:
    return (indices if ids is None else ids[indices]), values[indices]


def logprob(row: Logits, token: int, top: int) -> TokenLogprob:
    """Return the log probability of `token` in `row`, and the `top` most likely ids with theirs."""
    peak = row.max()
    base = float(peak) + math.log(_weights(row, peak, 1.0).sum())
    if top <= 0:
        return TokenLogprob(token, float(row[token]) - base)
    indices = largest(row, min(top, row.size))
    # Equal values are ordered by id, so that the result does not depend on the partition.
    indices = indices[np.lexsort((indices, -row[indices]))]
    alternatives = tuple((int(i), float(row[i]) - base) for i in indices)
    return TokenLogprob(token, float(row[token]) - base, alternatives)


def _generator(seed: int | None, index: int) -> np.random.Generator:
    if seed is None:
        return np.random.Generator(np.random.PCG64())
    return np.random.Generator(np.random.PCG64([seed_of(seed, index) & (2**64 - 1), 0]))


# Sampling from the rows of many answers at once, if the runner also returns the maximum of each block.
#
# One draw takes about thirty calls of numpy, and passes over a row that is in no cache. Here all rows share
# the calls, and only blocks with possible candidates are read: the largest, those that pass min-p, or those
# likely enough for top-p of a total that the runner computes.
#
# The result is that of `draw`, so no row depends on the others. Rounding differs, so a row is left to `draw`
# if rounding could decide, if ids are equally likely at the edge of top-k, and if too many or too few ids
# pass.


BLOCK = 16
"""Ids in a block: one cache line of the CPU."""
SEVERAL = 4
"""Fewer rows than this are as fast one by one."""
_LEAST_MIN_P = 1e-2
# Weights below this, relative to 1 for the likeliest, times the part that top-p leaves out, are rarely in a
# nucleus.
_SELDOM = 1e-2
_MOST_BLOCKS = 1536
_ALL = np.iinfo(np.intp).max
_ROUNDING = 1e-5
_UNKNOWN = 1e300
_LOWEST = np.finfo(np.float32).min


class BlockStats(Struct, frozen=True):
    """Statistics of the last step's rows, computed by the runner."""

    maxima: Logits
    """Maximum of each block."""
    totals: Callable[[Logits, Logits], RelativeProbs]
    """Returns the sum of exp((logit - peak) * heat) of each row as it is now, given peak and heat, the
    inverse temperature, for each. The result is undefined where the heat is 0.
    """


def leaves_few(sampling: Sampling) -> bool:
    """Whether min-p, or top-p alone, leaves few candidates."""
    nucleus = sampling.top_p < 1 and not sampling.min_p and not sampling.top_k
    return sampling.temperature > 0 and (nucleus or sampling.min_p >= _LEAST_MIN_P)


def heat_of(sampling: Sampling) -> float:
    return 1 / max(sampling.temperature, COLDEST)


class _Columns(Struct):
    """The parameters of all rows, as arrays."""

    asked: list[Sampling]
    nucleus: NDArray[np.bool_]
    """Whether top-p alone decides."""
    inverse_temperature: Logits
    below: NDArray[np.float64]
    """Distance below its row's peak down to which a logit is considered."""
    top_k: Indices
    top_p: NDArray[np.float64]

    @staticmethod
    def of(asked: Sequence[Sampling]) -> "_Columns":
        least = [one.min_p or _SELDOM * max(1 - one.top_p, _SELDOM) for one in asked]
        top_p = np.array([one.top_p for one in asked])
        return _Columns(
            asked=[*asked],
            nucleus=np.array([not one.min_p for one in asked]),
            inverse_temperature=np.array([heat_of(one) for one in asked], np.float32),
            below=np.log(least) * [one.temperature for one in asked],
            top_k=np.array([one.top_k if one.top_k > 0 else _ALL for one in asked]),
            top_p=np.where(top_p < 1, top_p, 2.0),
        )


def worth_totals(nuclei: int, rows: int) -> bool:
    """Whether it is worth it to compute the totals of a step's rows: the runner does so for all of them."""
    return nuclei >= SEVERAL and 2 * nuclei >= rows


class _Last(threading.local):
    """The parameters of the last step, which are usually those of the next one as well."""

    columns = _Columns.of([])


_last = _Last()


def _columns(asked: Sequence[Sampling]) -> _Columns:
    if _last.columns.asked != asked:
        _last.columns = _Columns.of(asked)
    return _last.columns


def largest_ids(logits: Logits, maxima: Logits, rows: Sequence[int]) -> list[int | None]:
    """Return the id of the largest value in each of these rows; None if all are forbidden."""
    of = np.array(rows)
    chosen = _of_rows(maxima, rows, of)
    block = chosen.argmax(axis=1)
    values = logits.reshape(-1, BLOCK)[of * maxima.shape[1] + block]
    ids: list[int | None] = (block * BLOCK + values.argmax(axis=1)).tolist()
    for number in np.flatnonzero(values.max(axis=1) == _NEVER).tolist():
        ids[number] = None
    return ids


def _of_rows(maxima: Logits, rows: Sequence[int], indices: Indices) -> Logits:
    """Select rows of the maxima; a copy of all takes longer than the check whether it is needed."""
    return maxima if [*rows] == [*range(len(maxima))] else maxima[indices]


def draw_few(
    logits: Logits,
    blocks: BlockStats,
    rows: Sequence[int],
    asked: Sequence[Sampling],
    uniforms: Sequence[float],
) -> list[int | None]:
    """Return the result of `draw` for each of these rows, all of which `leaves_few`; None if all ids are
    forbidden.
    """
    indices, columns, by = np.array(rows), _columns(asked), np.array(uniforms)
    maxima = _of_rows(blocks.maxima, rows, indices)
    peaks = maxima.max(axis=1)
    of, ids, weights = _passing(logits, maxima, indices, peaks, columns)
    if not of.size:
        return [_alone(logits[row], one, u) for row, one, u in zip(rows, asked, uniforms, strict=True)]
    counts = np.bincount(of, minlength=len(rows))
    ends = counts.cumsum()
    starts = ends - counts
    edges, more, sure = _edges(of, weights, starts, ends, columns, _totals(blocks, indices, peaks, columns))
    before, sums = _sums(weights * (weights >= edges[of]), starts)
    whole = sums[ends - 1] - before
    target = by * whole
    index = np.minimum(sums.searchsorted(before + target, side="right"), of.size - 1)
    # If more is kept, the result is the same as long as its margin on both sides is larger than that.
    over, margin = sums[index] - before, _ROUNDING * whole
    sure &= (over - weights[index] + more + margin <= target) & (target + by * more < over - margin)
    numbers: list[int | None] = ids[index].tolist()
    for number in np.flatnonzero(~sure).tolist():
        numbers[number] = _alone(logits[rows[number]], asked[number], uniforms[number])
    return numbers


def _alone(row: Logits, asked: Sampling, uniform: float) -> int | None:
    try:
        return draw(row, asked, uniform)
    except NoTokenLeft:
        return None


def _totals(blocks: BlockStats, rows: Indices, peaks: Logits, columns: _Columns) -> NDArray[np.float64]:
    """Return the total weight of each row; 0 if it is that of the ids that pass min-p, `_UNKNOWN` if it is
    not worth computing.
    """
    count, nucleus = len(blocks.maxima), columns.nucleus
    if not worth_totals(int(nucleus.sum()), count):
        return np.where(nucleus, _UNKNOWN, 0)
    all_peaks, all_heat = np.zeros(count, np.float32), np.zeros(count, np.float32)
    all_peaks[rows], all_heat[rows] = np.maximum(peaks, _LOWEST), columns.inverse_temperature * nucleus
    return np.where(nucleus, blocks.totals(all_peaks, all_heat)[rows], 0)


def _passing(
    logits: Logits, maxima: Logits, rows: Indices, peaks: Logits, columns: _Columns
) -> tuple[Indices, Indices, RelativeProbs]:
    """Return the ids that pass min-p, or could be in a nucleus: their rows, ids and relative
    probabilities, in order. Rows with too many of them get none.
    """
    floors = np.where(peaks > _NEVER, peaks + columns.below, np.inf).astype(np.float32)
    of, block = np.divmod(np.flatnonzero(maxima >= floors[:, None]), maxima.shape[1])
    few = np.bincount(of, minlength=rows.size) <= _MOST_BLOCKS
    if not few.all():
        of, block = of[few[of]], block[few[of]]
    values = logits.reshape(-1, BLOCK).take(rows[of] * maxima.shape[1] + block, axis=0)
    array = np.flatnonzero(values >= floors[of, None])
    line = array // BLOCK
    of = of[line]
    weights = np.exp((values.reshape(-1)[array] - peaks[of]) * columns.inverse_temperature[of])
    return of, array + (block[line] - line) * BLOCK, weights


def _edges(
    of: Indices,
    weights: RelativeProbs,
    starts: Indices,
    ends: Indices,
    columns: _Columns,
    totals: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return for each row the smallest weight that top-k and top-p keep in any case; an upper bound for
    the weight of others that they might keep; and whether this is certain.
    """
    counts, numbers = ends - starts, np.arange(starts.size)
    # Sorts each row separately, largest first: as all weights are at most one half here, nothing is rounded.
    order = np.sort(of - weights / 2.0)
    descending = 2 * (of - order)
    count = np.minimum(columns.top_k, counts)
    last = starts + count - 1
    sure = (counts > 0) & (
        (count == counts) | (descending[np.minimum(last + 1, of.size - 1)] < descending[last])
    )
    before, reached = _sums(np.where(np.arange(of.size) <= last[of], descending, 0), starts)
    total = np.where(totals > 0, totals, reached[ends - 1] - before)
    enough = columns.top_p * total
    nearly = np.clip(reached.searchsorted(before + enough * (1 - _ROUNDING)), starts, last)
    surely = reached.searchsorted(before + enough * (1 + _ROUNDING))
    edges, lowest = descending[nearly], descending[np.clip(surely, starts, last)]
    # Equal weights are kept together.
    kept, might = (order.searchsorted(numbers - each / 2, side="right") - 1 for each in (edges, lowest))
    unseen = np.where(surely > last, totals * (1 + _ROUNDING) - (reached[last] - before), 0)
    return edges, reached[might] - reached[kept] + np.maximum(unseen, 0), sure


def _sums(values: NDArray[np.floating], starts: Indices) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the running sum before each row, and at each index. All rows share one sum: its rounding
    error is negligible compared with `_ROUNDING`.
    """
    sums = values.cumsum(dtype=np.float64)
    return np.where(starts > 0, sums[starts - 1], 0), sums
