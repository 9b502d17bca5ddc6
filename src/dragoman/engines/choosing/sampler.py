"""From a row of logits to the next id.

The order is vLLM's: allowed ids, bad words, minimum length, bias, penalties, temperature, min-p, typical-p,
top-k, top-p. Another order, and samplers beyond these, are in `filters.py`. Reported log probabilities are
those of the row as it came from the model.

Nearly all of a vocabulary is so unlikely that it decides nothing. So a draw first looks at the likely ids
alone, and knows what all the others weigh at most. Only where that much could change what comes out is the
whole row computed. Either way the id is the one that the whole row gives.
"""

import math
import threading
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from dragoman.engines.choosing import Change, Edit, Ids, Logits, Places, Weights, scratch
from dragoman.engines.choosing.edits import apply, edits
from dragoman.engines.choosing.filters import Ordered, Undecided, largest, nucleus, pick, typical
from dragoman.engines.steps import seed_of
from dragoman.types import Sampling, TokenLogprob

# What the unlikely ids together weigh at most, where the likeliest id weighs 1. With less, more ids are
# likely; with more, the whole row is needed more often.
_REST = 1e-2
# Where more than one in so many ids is likely, to compute the whole row takes no longer.
_MANY = 32
# Nothing changes below that, and 1 / temperature stays a number.
COLDEST = 1e-30
_NEVER = np.float32(-np.inf)
_AT_ONCE = 32


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
        self._edits = edits(sampling, prompt, ends)
        self._mask: Callable[[Logits], None] | None = None
        self._uniforms: list[float] = []
        """Drawn in advance, the next one last."""
        self._random = None if sampling.temperature <= 0 else _generator(sampling.seed, index)
        asked = sampling.samplers
        self._ordered = None if asked is None else Ordered(sampling, asked, vocabulary)

    def add(self, edit: Edit) -> None:
        """One more rule, applied after the others."""
        self._edits.append(edit)

    def hold_to(self, mask: Callable[[Logits], None]) -> None:
        """What a constraint forbids. It comes after all rules, so that none of them lets a wrong id pass."""
        self._mask = mask

    @property
    def takes_largest(self) -> bool:
        """Whether it is the largest logit that decides, and no rule changes any."""
        return self._random is None and not self.edited

    @property
    def edited(self) -> bool:
        """Whether anything changes the row."""
        return bool(self._edits) or self._mask is not None

    @property
    def drawable(self) -> bool:
        """Whether temperature, min-p, top-k and top-p say all that is done with a row that rules changed."""
        return self._sampling.typical_p >= 1 and self._ordered is None

    def changes(self, output: Sequence[int]) -> list[Change]:
        """What the rules change next. They are asked once for each id, by this or by `sample`."""
        return [change for edit in self._edits for change in edit(output)]

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next draw; 0 where nothing is drawn."""
        if self._random is None:
            return 0.0
        if not self._uniforms:
            # One by one the same would come, in more time.
            self._uniforms = self._random.random(_AT_ONCE)[::-1].tolist()
        return self._uniforms.pop()

    def give_back(self, uniforms: Sequence[float]) -> None:
        """The last ones that were drawn decided nothing: they are drawn again."""
        if self._random is not None:
            self._uniforms += reversed(uniforms)

    def sample(self, row: Logits, output: Sequence[int]) -> int:
        """The next id, given the row for it and the ids generated so far. `row` is left as it is."""
        if self.edited:
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
    """Pick an id by temperature and filters; `uniform` in [0, 1) decides which."""
    peak = row.max()
    if peak == _NEVER:
        raise NoTokenLeft
    ids, rest = _likely(row, float(peak), sampling)
    if rest:
        try:
            return _choose(row, peak, ids, rest, sampling, uniform)
        except Undecided:
            ids = None
    return _choose(row, peak, ids, 0.0, sampling, uniform)


def _likely(row: Logits, peak: float, sampling: Sampling) -> tuple[Places | None, float]:
    """The ids to look at, in order, and what the others weigh at most. None stands for all ids."""
    if sampling.min_p > 0:
        floor = np.float32(peak + math.log(sampling.min_p) * sampling.temperature)
        return (row >= floor).nonzero()[0], 0.0
    if sampling.top_k > 0 or sampling.typical_p < 1:
        return None, 0.0
    floor = np.float32(peak + math.log(_REST / row.size) * sampling.temperature)
    # Rounded down, so that nothing that weighs more is left out.
    likely = row >= np.nextafter(floor, _NEVER)
    if np.count_nonzero(likely) > row.size // _MANY:
        return None, 0.0
    return likely.nonzero()[0], _REST


def _choose(
    row: Logits, peak: np.float32, ids: Places | None, rest: float, sampling: Sampling, uniform: float
) -> int:
    """Draw from these ids, if the others, which weigh `rest` at most, cannot change what comes out."""
    values = row if ids is None else row[ids]
    if sampling.typical_p < 1:
        places = typical(_weights(values, peak, sampling.temperature), sampling.typical_p)
        ids, values = _narrow(ids, values, places)
    if 0 < sampling.top_k < values.size:
        ids, values = _narrow(ids, values, np.sort(largest(values, sampling.top_k)))
    weights = _weights(values, peak, sampling.temperature)
    if sampling.top_p < 1:
        kept, rest = nucleus(weights, sampling.top_p, rest)
        ids, weights = _narrow(ids, weights, kept)
    place = pick(weights, uniform, rest)
    return place if ids is None else int(ids[place])


def _weights(values: Logits, peak: np.float32, temperature: float) -> Weights:
    """How likely each is, against the likeliest."""
    weights = np.subtract(values, peak, out=scratch(values.size))
    if temperature != 1:
        weights *= np.float32(1 / max(temperature, COLDEST))
    return np.exp(weights, out=weights)


def _narrow(ids: Places | None, values: Logits, places: Places) -> tuple[Places, Logits]:
    return (places if ids is None else ids[places]), values[places]


def logprob(row: Logits, token: int, top: int) -> TokenLogprob:
    """The log probability of `token` in `row`, and the `top` most likely ids with theirs."""
    peak = row.max()
    base = float(peak) + math.log(_weights(row, peak, 1.0).sum())
    if top <= 0:
        return TokenLogprob(token, float(row[token]) - base)
    places = largest(row, min(top, row.size))
    # Equal values are put in the order of their ids, so that the answer does not depend on the partition.
    places = places[np.lexsort((places, -row[places]))]
    alternatives = tuple((int(i), float(row[i]) - base) for i in places)
    return TokenLogprob(token, float(row[token]) - base, alternatives)


def _generator(seed: int | None, index: int) -> np.random.Generator:
    if seed is None:
        return np.random.Generator(np.random.PCG64())
    return np.random.Generator(np.random.PCG64([seed_of(seed, index) & (2**64 - 1), 0]))


# Choices from the rows of many answers at once, where the runner gives the largest of each block as well.
#
# One choice takes some thirty calls of numpy, and passes over a row that is in no cache. Here all rows
# share the calls, and only blocks are read that hold what can be chosen: the largest, what passes min-p, or
# what is likely enough for top-p of a total that the runner sums up.
#
# What comes out is what `draw` gives, so no row depends on the others. That rounds in other places, so a row
# is left to it where rounding could decide, where ids are equally likely at the edge of top-k, and where too
# many pass or too few.


BLOCK = 16
"""Ids in a block: a line of the processor's cache."""
SEVERAL = 4
"""One by one, fewer rows take no longer."""
_LEAST_MIN_P = 1e-2
# What weighs less, against 1 for the likeliest, is seldom in a nucleus: times the part that this leaves out.
_SELDOM = 1e-2
_MOST_BLOCKS = 1536
_ALL = np.iinfo(np.intp).max
_ROUNDING = 1e-5
_UNKNOWN = 1e300
_LOWEST = np.finfo(np.float32).min


class RowBlocks(Struct, frozen=True):
    """What a runner tells of the rows of its last step, beside the logits."""

    maxima: Logits
    """The largest of each block."""
    totals: Callable[[Logits, Logits], Weights]
    """What all rows weigh, as they are now: the sum of exp((logit - peak) * heat), given both for each. Where
    the heat is 0 it means nothing."""


def leaves_few(sampling: Sampling) -> bool:
    """Whether min-p says that few ids can be drawn, or top-p does, by itself."""
    nucleus = sampling.top_p < 1 and not sampling.min_p and not sampling.top_k
    return sampling.temperature > 0 and (nucleus or sampling.min_p >= _LEAST_MIN_P)


def heat_of(sampling: Sampling) -> float:
    return 1 / max(sampling.temperature, COLDEST)


class _Columns(Struct):
    """What all rows are asked, each thing in an array."""

    asked: list[Sampling]
    nucleus: NDArray[np.bool_]
    """Whether top-p says it by itself."""
    heat: Logits
    below: NDArray[np.float64]
    """How far below the peak of its row a logit is looked at."""
    top_k: Places
    top_p: NDArray[np.float64]

    @staticmethod
    def of(asked: Sequence[Sampling]) -> "_Columns":
        least = [one.min_p or _SELDOM * max(1 - one.top_p, _SELDOM) for one in asked]
        top_p = np.array([one.top_p for one in asked])
        return _Columns(
            asked=[*asked],
            nucleus=np.array([not one.min_p for one in asked]),
            heat=np.array([heat_of(one) for one in asked], np.float32),
            below=np.log(least) * [one.temperature for one in asked],
            top_k=np.array([one.top_k if one.top_k > 0 else _ALL for one in asked]),
            top_p=np.where(top_p < 1, top_p, 2.0),
        )


def worth_totals(nuclei: int, rows: int) -> bool:
    """Whether so many of a step's rows are to be summed up: the runner does that to all of them."""
    return nuclei >= SEVERAL and 2 * nuclei >= rows


class _Last(threading.local):
    """The columns of the last step: mostly those of the next one as well."""

    columns = _Columns.of([])


_last = _Last()


def _columns(asked: Sequence[Sampling]) -> _Columns:
    if _last.columns.asked != asked:
        _last.columns = _Columns.of(asked)
    return _last.columns


def largest_ids(logits: Logits, maxima: Logits, rows: Sequence[int]) -> list[int | None]:
    """The id of the largest value in each of these rows; None where nothing is left."""
    of = np.array(rows)
    chosen = _of_rows(maxima, rows, of)
    block = chosen.argmax(axis=1)
    values = logits.reshape(-1, BLOCK)[of * maxima.shape[1] + block]
    ids: list[int | None] = (block * BLOCK + values.argmax(axis=1)).tolist()
    for number in np.flatnonzero(values.max(axis=1) == _NEVER).tolist():
        ids[number] = None
    return ids


def _of_rows(maxima: Logits, rows: Sequence[int], places: Places) -> Logits:
    """A copy of all of them takes longer than to look whether it is needed."""
    return maxima if [*rows] == [*range(len(maxima))] else maxima[places]


def draw_few(
    logits: Logits,
    blocks: RowBlocks,
    rows: Sequence[int],
    asked: Sequence[Sampling],
    uniforms: Sequence[float],
) -> list[int | None]:
    """What `draw` gives for each of these rows, all of which `leaves_few`; None where nothing is left."""
    places, columns, by = np.array(rows), _columns(asked), np.array(uniforms)
    maxima = _of_rows(blocks.maxima, rows, places)
    peaks = maxima.max(axis=1)
    of, ids, weights = _passing(logits, maxima, places, peaks, columns)
    if not of.size:
        return [_alone(logits[row], one, u) for row, one, u in zip(rows, asked, uniforms, strict=True)]
    counts = np.bincount(of, minlength=len(rows))
    ends = counts.cumsum()
    starts = ends - counts
    edges, more, sure = _edges(of, weights, starts, ends, columns, _totals(blocks, places, peaks, columns))
    before, sums = _sums(weights * (weights >= edges[of]), starts)
    whole = sums[ends - 1] - before
    target = by * whole
    place = np.minimum(sums.searchsorted(before + target, side="right"), of.size - 1)
    # Where more is kept, what is drawn stays the same if its part, on both sides, is larger than that.
    over, margin = sums[place] - before, _ROUNDING * whole
    sure &= (over - weights[place] + more + margin <= target) & (target + by * more < over - margin)
    found: list[int | None] = ids[place].tolist()
    for number in np.flatnonzero(~sure).tolist():
        found[number] = _alone(logits[rows[number]], asked[number], uniforms[number])
    return found


def _alone(row: Logits, asked: Sampling, uniform: float) -> int | None:
    try:
        return draw(row, asked, uniform)
    except NoTokenLeft:
        return None


def _totals(blocks: RowBlocks, rows: Places, peaks: Logits, columns: _Columns) -> NDArray[np.float64]:
    """What each row weighs; 0 where that is what passes min-p, and `_UNKNOWN` where it is not worth a sum."""
    count, nucleus = len(blocks.maxima), columns.nucleus
    if not worth_totals(int(nucleus.sum()), count):
        return np.where(nucleus, _UNKNOWN, 0)
    all_peaks, all_heat = np.zeros(count, np.float32), np.zeros(count, np.float32)
    all_peaks[rows], all_heat[rows] = np.maximum(peaks, _LOWEST), columns.heat * nucleus
    return np.where(nucleus, blocks.totals(all_peaks, all_heat)[rows], 0)


def _passing(
    logits: Logits, maxima: Logits, rows: Places, peaks: Logits, columns: _Columns
) -> tuple[Places, Places, Weights]:
    """What passes min-p, or could be in a nucleus, row by row and in order: of which row, which id, and how
    likely against the likeliest. Nothing of a row that has too many."""
    floors = np.where(peaks > _NEVER, peaks + columns.below, np.inf).astype(np.float32)
    of, block = np.divmod(np.flatnonzero(maxima >= floors[:, None]), maxima.shape[1])
    few = np.bincount(of, minlength=rows.size) <= _MOST_BLOCKS
    if not few.all():
        of, block = of[few[of]], block[few[of]]
    values = logits.reshape(-1, BLOCK).take(rows[of] * maxima.shape[1] + block, axis=0)
    found = np.flatnonzero(values >= floors[of, None])
    line = found // BLOCK
    of = of[line]
    weights = np.exp((values.reshape(-1)[found] - peaks[of]) * columns.heat[of])
    return of, found + (block[line] - line) * BLOCK, weights


def _edges(
    of: Places,
    weights: Weights,
    starts: Places,
    ends: Places,
    columns: _Columns,
    totals: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Of each row the least weight that top-k and top-p keep in any case; what the others weigh at most that
    they might keep too; and whether that is certain."""
    counts, numbers = ends - starts, np.arange(starts.size)
    # Each row by itself, the largest first: of numbers that are all below one half, nothing is rounded.
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
    # Equals are kept together.
    kept, might = (order.searchsorted(numbers - each / 2, side="right") - 1 for each in (edges, lowest))
    unseen = np.where(surely > last, totals * (1 + _ROUNDING) - (reached[last] - before), 0)
    return edges, reached[might] - reached[kept] + np.maximum(unseen, 0), sure


def _sums(values: NDArray[np.floating], starts: Places) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What has been reached before each row, and at each place. All rows are one sum: what that rounds is
    nothing against `_ROUNDING`."""
    sums = values.cumsum(dtype=np.float64)
    return np.where(starts > 0, sums[starts - 1], 0), sums
