"""Choices from the rows of many answers at once, where the runner gives the largest of each block as well.

One choice takes some thirty calls of numpy, and passes over a row that is in no cache. Here all rows share
the calls, and only blocks are read that hold what can be chosen: the largest, or what passes min-p. No row
depends on the others: sums are taken value by value, and what a shorter row is filled up with adds nothing.

What comes out is what `sampler.draw` gives. That rounds in other places, so a row is left to it where
rounding could decide, where ids are equally likely at the edge of top-k, and where too many pass.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dragoman.engines.choosing.arrays import Logits, Places, Weights
from dragoman.engines.choosing.sampler import COLDEST, NoTokenLeft, draw
from dragoman.types import Sampling

BLOCK = 16
"""Ids in a block: a line of the processor's cache."""
_LEAST_MIN_P = 1e-2
_MOST_BLOCKS = 128
_ROUNDING = 1e-5


def leaves_few(sampling: Sampling) -> bool:
    """Whether min-p says that few ids can be drawn."""
    return sampling.temperature > 0 and sampling.min_p >= _LEAST_MIN_P


def largest_ids(logits: Logits, maxima: Logits, rows: Sequence[int]) -> list[int | None]:
    """The id of the largest value in each of these rows; None where nothing is left."""
    of = np.array(rows)
    block = maxima[of].argmax(axis=1)
    values = logits.reshape(-1, BLOCK)[of * maxima.shape[1] + block]
    ids = (block * BLOCK + values.argmax(axis=1)).tolist()
    possible = (maxima[of, block] > -np.inf).tolist()
    return [id_ if yes else None for id_, yes in zip(ids, possible, strict=True)]


def draw_few(
    logits: Logits,
    maxima: Logits,
    rows: Sequence[int],
    asked: Sequence[Sampling],
    uniforms: Sequence[float],
) -> list[int | None]:
    """What `draw` gives for each of these rows, all with a min-p; None where nothing is left."""
    ids, weights = _passing(logits, maxima, np.array(rows), asked)
    kept, sure = _kept(weights, asked)
    sums = kept.cumsum(axis=1, dtype=np.float64)
    target = np.array(uniforms) * sums[:, -1]
    each, place = np.arange(len(rows)), _first(sums > target[:, None])
    over, margin = sums[each, place], _ROUNDING * sums[:, -1]
    sure &= (over - kept[each, place] + margin <= target) & (target < over - margin)
    found: list[int | None] = ids[each, place].tolist()
    for number in np.flatnonzero(~sure).tolist():
        found[number] = _alone(logits[rows[number]], asked[number], uniforms[number])
    return found


def _alone(row: Logits, asked: Sampling, uniform: float) -> int | None:
    try:
        return draw(row, asked, uniform)
    except NoTokenLeft:
        return None


def _passing(
    logits: Logits, maxima: Logits, rows: Places, asked: Sequence[Sampling]
) -> tuple[Places, Weights]:
    """The ids that pass min-p, in order, and how likely each is against the likeliest; then zeros."""
    maxima = maxima[rows]
    peaks = maxima.max(axis=1)
    below = [math.log(one.min_p) * one.temperature for one in asked]
    floors = np.where(peaks > -np.inf, peaks + below, np.inf).astype(np.float32)
    of, block = np.divmod(np.flatnonzero(maxima >= floors[:, None]), maxima.shape[1])
    few = np.bincount(of, minlength=rows.size) <= _MOST_BLOCKS
    of, block = of[few[of]], block[few[of]]
    values = logits.reshape(-1, BLOCK)[rows[of] * maxima.shape[1] + block]
    line, place = np.nonzero(values >= floors[of, None])
    of = of[line]
    heat = np.array([1 / max(one.temperature, COLDEST) for one in asked], np.float32)
    counts = np.bincount(of, minlength=rows.size)
    column = np.arange(of.size) - (counts.cumsum() - counts)[of]
    shape = (rows.size, max(1, int(counts.max())))
    ids, weights = np.zeros(shape, np.intp), np.zeros(shape, np.float32)
    ids[of, column] = block[line] * BLOCK + place
    weights[of, column] = np.exp((values[line, place] - peaks[of]) * heat[of])
    return ids, weights


def _kept(weights: Weights, asked: Sequence[Sampling]) -> tuple[Weights, NDArray[np.bool_]]:
    """What top-k and top-p leave, the rest as zeros; and of which rows that is certain."""
    each, width = np.arange(len(asked)), weights.shape[1]
    descending = np.sort(weights, axis=1)[:, ::-1]
    count = np.array([one.top_k if 0 < one.top_k < width else width for one in asked])
    edge, following = descending[each, count - 1], descending[each, count % width]
    sure = (count == width) | (edge == 0) | (following < edge)
    reached = np.where(np.arange(width) < count[:, None], descending, 0).cumsum(axis=1, dtype=np.float64)
    top_p = np.array([one.top_p for one in asked])
    enough = top_p * reached[:, -1]
    last = descending[each, _first(reached >= (enough * (1 - _ROUNDING))[:, None])]
    surely = reached >= (enough * (1 + _ROUNDING))[:, None]
    sure &= (top_p >= 1) | (surely[:, -1] & (descending[each, _first(surely)] == last))
    edge = np.where(top_p < 1, np.maximum(edge, last), edge)
    return np.where(weights >= edge[:, None], weights, np.float32(0)), sure


def _first(true: NDArray[np.bool_]) -> Places:
    """The first place in each row that is true; 0 where none is."""
    found: Places = true.argmax(axis=1)
    return found
