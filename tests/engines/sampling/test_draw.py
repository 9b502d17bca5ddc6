"""Draws, held against the plain definition of every filter, computed for the whole row."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dragoman.engines.sampling import Logits, sampler
from dragoman.engines.sampling.filters import FullRowNeeded, largest, nucleus, pick, typical
from dragoman.engines.sampling.sampler import draw
from dragoman.types import Sampling

LAST = 1 - 2**-53
uniforms = st.floats(0, 1, exclude_max=True)


@st.composite
def rows(draw_: st.DrawFn, size: int = 3000, ties: bool = True) -> Logits:
    """Rows as models make them, and as they do not: flat, steep, one far ahead, equal values, masked ids."""
    random = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    row = random.normal(scale=draw_(st.sampled_from([0.0, 0.3, 2.0, 8.0])), size=draw_(st.integers(1, size)))
    if ties and draw_(st.booleans()):
        row = row.round(draw_(st.integers(0, 1)))
    row[0] += draw_(st.sampled_from([0.0, 12.0, 60.0]))
    masked = random.random(row.size) < draw_(st.sampled_from([0.0, 0.5, 1.0]))
    masked[random.integers(row.size)] = False
    row[masked] = -np.inf
    result: Logits = random.permutation(row).astype(np.float32)
    return result


def plain(row: Logits, asked: Sampling, uniform: float, top_p: float) -> int:
    values = row.astype(np.float64)
    weights = np.exp((values - values.max()) / asked.temperature)
    weights[weights < asked.min_p] = 0
    if 0 < asked.top_k < row.size:
        weights[values < np.sort(values)[-asked.top_k]] = 0
    if asked.top_p < 1:
        descending = np.sort(weights)[::-1]
        last = np.searchsorted(descending.cumsum(), top_p * weights.sum())
        weights[weights < descending[min(last, row.size - 1)] * (1 - 1e-6)] = 0
    sums = weights.cumsum()
    return int(min(np.searchsorted(sums, uniform * sums[-1], side="right"), weights.nonzero()[0][-1]))


def plainly(row: Logits, asked: Sampling, uniform: float) -> set[int]:
    """What the plain definition gives, and gives where rounding falls the other way."""
    return {
        plain(row, asked, min(max(uniform + shift, 0.0), LAST), asked.top_p + part)
        for shift in (-1e-5, 0.0, 1e-5)
        for part in (-1e-6, 0.0, 1e-6)
    }


def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ids a weight is computed for, each time."""
    sizes: list[int] = []
    weights = sampler._weights

    def counted(values: Logits, peak: np.float32, temperature: float) -> Any:
        sizes.append(values.size)
        return weights(values, peak, temperature)

    monkeypatch.setattr(sampler, "_weights", counted)
    return sizes


@settings(max_examples=300, deadline=None)
@given(rows(), st.sampled_from([0.2, 0.8, 1.0, 2.0]), st.sampled_from([0.0, 0.5, 0.95, 0.999, 1.0]), uniforms)
def test_top_p_is_as_defined(row: Logits, temperature: float, top_p: float, uniform: float) -> None:
    asked = Sampling(max_tokens=1, temperature=temperature, top_p=top_p)
    assert draw(row, asked, uniform) in plainly(row, asked, uniform)


@settings(max_examples=200, deadline=None)
@given(rows(ties=False), st.sampled_from([0, 1, 7, 400]), st.sampled_from([0.0, 1e-3, 0.3]), uniforms)
def test_the_filters_together_are_as_defined(row: Logits, top_k: int, min_p: float, uniform: float) -> None:
    if np.unique(row[row > -np.inf]).size < np.count_nonzero(row > -np.inf):
        top_k = 0  # Which of equals top-k keeps is not defined.
    asked = Sampling(max_tokens=1, top_k=top_k, min_p=min_p, top_p=0.9)
    assert draw(row, asked, uniform) in plainly(row, asked, uniform)


@given(rows(), st.floats(0.01, 0.999))
def test_typical_is_as_defined(row: Logits, share: float) -> None:
    weights = np.exp(row - row.max())
    probabilities = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    possible = probabilities.nonzero()[0]
    information = -np.log(probabilities[possible])
    distances = np.abs(information - (probabilities[possible] * information).sum())
    kept = typical(weights, share)
    assert (np.diff(kept) > 0).all()
    farthest = distances[np.isin(possible, kept)].max()
    # Enough is kept, what is kept is nearer than what is not, and without the farthest it is not enough.
    assert probabilities[kept].sum() >= share - 1e-5
    assert (distances[~np.isin(possible, kept)] >= farthest - 1e-4).all()
    assert probabilities[possible[distances < farthest - 1e-4]].sum() < share + 1e-5


@given(rows(), st.integers(1, 1200))
def test_largest_are_the_largest(row: Logits, count: int) -> None:
    count = min(count, row.size)
    assert np.sort(row[largest(row, count)]).tolist() == np.sort(row)[-count:].tolist()


@given(rows(), st.sampled_from([0.3, 0.9, 0.99]), st.floats(0, 0.5))
def test_a_nucleus_says_what_else_might_be_in_it(row: Logits, top_p: float, rest: float) -> None:
    weights = np.exp(row - row.max())
    try:
        certain, more = nucleus(weights, top_p, rest)
    except FullRowNeeded:
        return
    for part in (0.0, 0.4, 1.0):
        # The rest comes in pieces that are smaller than whatever is in the nucleus.
        pieces: NDArray[np.float32] = np.full(200_000, part * rest / 200_000, np.float32)
        kept, _ = nucleus(np.concatenate([weights, pieces]), top_p)
        assert set(certain) <= set(kept)
        assert weights[kept].sum() - weights[certain].sum() <= more + 1e-3


def test_the_first_and_the_last_that_can_be_picked() -> None:
    for size in (5, 2000):
        weights = np.zeros(size, np.float32)
        weights[[2, 3]] = 0.1
        assert (pick(weights, 0.0), pick(weights, LAST)) == (2, 3)


def test_of_a_steep_row_only_the_likely_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = np.zeros(5000, np.float32)
    row[[10, 20, 30]] = (30, 31, 29)
    sizes = computed(monkeypatch)
    assert [draw(row, Sampling(max_tokens=1), uniform) for uniform in (0.1, 0.5, 0.99)] == [10, 20, 30]
    assert draw(row, Sampling(max_tokens=1, top_p=0.5), 0.9) == 20
    assert sizes == [3, 3, 3, 3]


def test_where_the_unlikely_could_decide_the_whole_row_is(monkeypatch: pytest.MonkeyPatch) -> None:
    row = np.full(5000, 0.0, np.float32)
    row[2500] = 16.0
    sizes = computed(monkeypatch)
    # The others weigh 5000 / e**16 = 0.06 percent, half of them before the likely one.
    assert draw(row, Sampling(max_tokens=1), 1e-4) < 2500
    assert draw(row, Sampling(max_tokens=1), 4e-4) == 2500
    assert draw(row, Sampling(max_tokens=1), 0.9999) > 2500
    assert sizes == [1, 5000, 1, 5000, 1, 5000]


def test_the_unlikely_can_bring_another_id_into_a_nucleus() -> None:
    row = np.zeros(5000, np.float32)
    row[[1000, 2000]] = (16.0, 15.0)
    # The likely ids weigh 1 and 0.36788, the others 0.00056: with them, 1 is not enough any more.
    asked = Sampling(max_tokens=1, top_p=0.7309)
    assert 0.7309 * 1.36788 < 1 < 0.7309 * 1.36844
    assert draw(row, asked, 0.9) == 2000


def test_the_coldest_temperature_is_no_trouble() -> None:
    row = np.array([1, 3, 2], np.float32)
    for temperature in (1e-3, 1e-38, 1e-300, 5e-324):
        assert draw(row, Sampling(max_tokens=1, temperature=temperature, top_p=0.9), 0.5) == 1
