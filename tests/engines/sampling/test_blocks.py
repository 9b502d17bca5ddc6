"""What is chosen from many rows at once is what each gives by itself."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.engines.sampling import Logits, sampler
from dragoman.engines.sampling.batched import Continuation, StepSampler, TokenChoice
from dragoman.engines.sampling.sampler import BLOCK, BlockStats, draw, draw_few, largest_ids
from dragoman.types import Job, Sampling

SIZE = 200 * BLOCK
LOWEST = np.finfo(np.float32).min
PROMPT = np.array([1], np.int32)


@st.composite
def several(draw_: st.DrawFn) -> Logits:
    """Rows as models make them, flat ones, steep ones, and some with many equal values."""
    random = np.random.default_rng(draw_(st.integers(0, 2**32 - 1)))
    rows = random.normal(size=(draw_(st.integers(1, 6)), SIZE))
    rows *= random.choice([0.3, 2.0, 8.0], size=(len(rows), 1))
    if draw_(st.booleans()):
        rows = rows.round(draw_(st.integers(0, 1)))
    array: Logits = rows.astype(np.float32)
    return array


def maxima_of(rows: Logits) -> Logits:
    array: Logits = rows.reshape(len(rows), -1, BLOCK).max(axis=2)
    return array


def blocks_of(rows: Logits) -> BlockStats:
    def totals(peaks: Logits, heat: Logits) -> Logits:
        with np.errstate(invalid="ignore"):
            summed: Logits = np.exp((rows - peaks[:, None]) * heat[:, None]).sum(axis=1)
        return summed

    return BlockStats(maxima_of(rows), totals)


kinds = st.builds(
    Sampling,
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.2, 0.8, 1.0, 2.0]),
    min_p=st.sampled_from([0.01, 0.05, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 5000]),
    top_p=st.sampled_from([0.0, 0.5, 0.95, 0.9999999, 1.0]),
)
alone = st.builds(
    Sampling,
    max_tokens=st.just(9),
    temperature=st.sampled_from([1e-300, 0.2, 0.8, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.95, 0.999, 0.9999999]),
)
"""Top-p, and nothing else."""
uniforms = st.floats(0, 1, exclude_max=True)


@settings(max_examples=300, deadline=None)
@given(several(), st.data())
def test_each_row_gives_what_it_gives_alone(rows: Logits, data: st.DataObject) -> None:
    asked = [data.draw(kinds | alone) for _ in rows]
    numbers = [data.draw(uniforms) for _ in rows]
    expected = [draw(*each) for each in zip(rows, asked, numbers, strict=True)]
    assert draw_few(rows, blocks_of(rows), range(len(rows)), asked, numbers) == expected


def test_of_rows_as_models_make_them_nearly_none_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    rows = random.normal(size=(200, SIZE), scale=4).astype(np.float32)
    left: list[Sampling] = []
    monkeypatch.setattr(sampler, "draw", lambda _row, asked, _uniform: left.append(asked))
    for asked in (Sampling(max_tokens=1, top_p=0.9), Sampling(max_tokens=1, min_p=0.05, top_p=0.9)):
        draw_few(rows, blocks_of(rows), range(200), [asked] * 200, random.random(200).tolist())
    assert len(left) < 8


def test_what_is_left_open_at_the_edge_seldom_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding says whether the last of four ids is kept: that matters to few draws."""
    rows = np.full((50, SIZE), -30, np.float32)
    rows[:, [3, 700]], rows[:, 900] = 0, -1
    rows[:, 2000] = np.log(np.float32(1e-2))
    total = float(np.exp(rows[0], dtype=np.float64).sum())
    asked = Sampling(max_tokens=1, top_p=(2 + np.exp(-1)) / total)
    numbers = np.random.default_rng(4).random(50).tolist()
    expected = [draw(*each) for each in zip(rows, [asked] * 50, numbers, strict=True)]
    left: list[Sampling] = []
    monkeypatch.setattr(sampler, "draw", lambda _row, asked, _uniform: left.append(asked))
    items = draw_few(rows, blocks_of(rows), range(50), [asked] * 50, numbers)
    assert len(left) < 5
    assert [id_ for id_ in items if id_ is not None] == [
        id_ for id_, mine in zip(expected, items, strict=True) if mine is not None
    ]


@given(several())
def test_the_largest_is_the_first_of_equals(rows: Logits) -> None:
    assert largest_ids(rows, maxima_of(rows), range(len(rows))) == rows.argmax(axis=1).tolist()


def test_of_the_rows_some_can_be_asked_for() -> None:
    rows = np.random.default_rng(1).normal(size=(5, SIZE), scale=4).astype(np.float32)
    asked = Sampling(max_tokens=1, min_p=0.1)
    expected = [draw(rows[3], asked, 0.3), draw(rows[1], asked, 0.6)]
    assert draw_few(rows, blocks_of(rows), [3, 1], [asked] * 2, [0.3, 0.6]) == expected
    assert largest_ids(rows, maxima_of(rows), [4, 0]) == rows[[4, 0]].argmax(axis=1).tolist()


def test_where_a_row_leaves_nothing_there_is_no_id() -> None:
    rows = np.zeros((2, SIZE), np.float32)
    rows[0] = -np.inf
    for asked in (Sampling(max_tokens=1, min_p=0.1), Sampling(max_tokens=1, top_p=0.9)):
        expected = [None, draw(rows[1], asked, 0.5)]
        assert draw_few(rows, blocks_of(rows), [0, 1], [asked] * 2, [0.5, 0.5]) == expected


ALL: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"min_p": 0.05, "top_k": 40, "logprobs": 1},
    {"top_p": 0.9},
    {"min_p": 0.05, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {7: 2.5, 9: -1.0}},
    {"min_p": 0.1, "repetition_penalty": 1.2, "frequency_penalty": -0.5, "min_tokens": 3, "logprobs": 2},
    {"min_p": 0.1, "allowed_token_ids": frozenset({3, 17, 18, 900})},
]
"""Side by side: greedy, with min-p, without, with rules of one kind and of several."""
NUCLEI: list[dict[str, Any]] = [{"top_p": 0.9}, {"temperature": 0.7, "top_p": 0.95}, {"temperature": 0.0}]
CHANGED: list[dict[str, Any]] = [*NUCLEI, {"top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": -2.0}]


def answers(count: int, kinds: list[dict[str, Any]]) -> list[TokenChoice]:
    choices = []
    for number in range(count):
        asked = Sampling(max_tokens=99, seed=number, **kinds[number % len(kinds)])
        job = Job(id="job", prompt=(1,), sampling=asked)
        answer = Continuation(job, 0, PROMPT, vocabulary=SIZE, ends=frozenset(), room=99)
        choices.append(TokenChoice(answer, number))
    return choices


class Early:
    """Sums up what will be asked for before anybody does, as a runner may."""

    def __init__(self, rows: Logits, choices: list[TokenChoice]) -> None:
        self.used = 0
        self._heat = np.array([choice.answer.inverse_temperature for choice in choices], np.float32)
        self._later = blocks_of(rows)
        self._begun = self._later.totals(np.maximum(rows.max(axis=1), LOWEST), self._heat)
        self.blocks = BlockStats(self._later.maxima, self._totals)

    def _totals(self, peaks: Logits, heat: Logits) -> Logits:
        if not np.array_equal(heat, self._heat):
            return self._later.totals(peaks, heat)
        self.used += 1
        # Of rows without heat it may have seen anything.
        return np.where(heat > 0, self._begun, np.nan)


@pytest.mark.parametrize(("kinds", "used"), [(ALL, 0), (NUCLEI, 6), (CHANGED, 0)])
def test_a_step_is_the_same_with_blocks_and_without(kinds: list[dict[str, Any]], used: int) -> None:
    random = np.random.default_rng(2)
    choosers, ours, theirs = StepSampler(1), answers(60, kinds), answers(60, kinds)
    likely = random.normal(size=(60, SIZE), scale=3)
    for _ in range(6):
        # The same ids are likely each time, so that what was said before matters to the penalties.
        rows = (likely + random.normal(size=likely.shape, scale=0.1)).astype(np.float32)
        rows[[0, 1]] = -np.inf
        before, early = rows.copy(), Early(rows, ours)
        steps = choosers.advance(ours, rows, early.blocks)
        used -= early.used
        assert np.array_equal(rows, before)
        expected = choosers.advance(theirs, rows)
        assert [(each.ids, each.logprobs, each.finish) for each in steps] == [
            (each.ids, each.logprobs, each.finish) for each in expected
        ]
    assert used == 0
