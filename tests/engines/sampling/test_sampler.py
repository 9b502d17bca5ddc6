"""From logits to an id: rules one by one, then properties over random rows."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dragoman.engines.sampling import Ids, Logits, LogitsChange
from dragoman.engines.sampling.filters import largest
from dragoman.engines.sampling.logits_processors import apply, logits_processors
from dragoman.engines.sampling.sampler import NoTokenLeft, Sampler, draw, logprob
from dragoman.types import ExtraSamplers, Sampling

NO_PROMPT: Ids = np.zeros(0, np.int32)
rows = arrays(np.float32, st.integers(2, 700), elements=st.floats(-30, 30, width=32))
uniforms = st.floats(0, 1, exclude_max=True)


def sampler(vocabulary: int, index: int = 0, prompt: Ids = NO_PROMPT, **kinds: Any) -> Sampler:
    return Sampler(Sampling(max_tokens=9, **kinds), index, prompt, vocabulary, frozenset({0}))


def edited(row: list[float], output: list[int], prompt: Ids = NO_PROMPT, **kinds: Any) -> list[float]:
    """A row after the rules, which are told of the output id by id, as in a run."""
    rules = logits_processors(Sampling(max_tokens=9, **kinds), prompt, frozenset({0}))
    result = np.array(row, np.float32)
    for length in range(len(output) + 1):
        result = np.array(row, np.float32)
        for rule in rules:
            apply(result, rule(output[:length]))
    return [float(value) for value in result]


def possible(row: Logits, **kinds: Any) -> set[int]:
    """Every id that can come out."""
    sampling = Sampling(max_tokens=1, **kinds)
    return {draw(row, sampling, uniform) for uniform in np.linspace(0, 1, 4000, endpoint=False)}


def softmax(row: Logits) -> Logits:
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    result: Logits = (weights / weights.sum()).astype(np.float32)
    return result


def test_no_rules_no_edits() -> None:
    assert logits_processors(Sampling(max_tokens=1), NO_PROMPT, frozenset()) == []


def test_penalties_may_look_at_the_newest_ids_only() -> None:
    prompt: Ids = np.array([0, 1], np.int32)
    newest = ExtraSamplers(penalty_range=2)
    values = edited([2, 2, 2, 2], [2, 2], prompt, repetition_penalty=2.0, samplers=newest)
    assert values == [2, 2, 1, 2]
    kinds = {"frequency_penalty": 0.5, "presence_penalty": 0.25}
    assert edited([2, 2, 2, 2], [3, 2, 2], prompt, **kinds, samplers=newest) == [2, 2, 0.75, 2]


def test_a_window_over_everything_changes_nothing() -> None:
    prompt: Ids = np.array([0, 1], np.int32)
    kinds = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    row, output = [2.0, -2.0, 2.0, -2.0], [3, 3, 1]
    within = edited(row, output, prompt, **kinds, samplers=ExtraSamplers(penalty_range=100))
    assert within == edited(row, output, prompt, **kinds)


def test_repetition_counts_prompt_and_output() -> None:
    prompt: Ids = np.array([0], np.int32)
    assert edited([2, -2, 2, -2], [1], prompt, repetition_penalty=2.0) == [1, -4, 2, -2]


def test_frequency_counts_and_presence_does_not() -> None:
    assert edited([0, 0, 0], [1, 1, 2], frequency_penalty=1.0) == [0, -2, -1]
    assert edited([0, 0, 0], [1, 1, 2], presence_penalty=1.0) == [0, -1, -1]
    assert edited([0, 0, 0], [1, 1, 2], presence_penalty=-0.5, frequency_penalty=0.5) == [0, -0.5, 0]


def test_bias() -> None:
    assert edited([1, 1, 1], [], logit_bias={0: 5.0, 2: -100.0}) == [6, 1, -99]


def test_allowed_ids() -> None:
    assert edited([1, 2, 3], [], allowed_token_ids=(1,)) == [-math.inf, 2, -math.inf]


def test_bad_words_forbid_their_last_id() -> None:
    words = ((3,), (1, 2))
    assert edited([0, 0, 0, 0], [], bad_words=words) == [0, 0, 0, -math.inf]
    assert edited([0, 0, 0, 0], [1], bad_words=words) == [0, 0, -math.inf, -math.inf]


def test_min_tokens_forbids_ends_and_stops() -> None:
    kinds: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": frozenset({1})}
    assert edited([0, 0, 0], [2], **kinds) == [-math.inf, -math.inf, 0]
    assert edited([0, 0, 0], [2, 2], **kinds) == [0, 0, 0]


def test_a_rule_of_ones_own_is_one_line() -> None:
    mine = sampler(5, temperature=0.0)
    mine.add(lambda output: [LogitsChange(np.array([2]), alone=True)])
    assert mine.sample(np.array([9, 8, 1, 7, 6], np.float32), []) == 2


def test_nothing_left() -> None:
    row = np.full(4, -np.inf, np.float32)
    for temperature in (0.0, 1.0):
        with pytest.raises(NoTokenLeft):
            sampler(4, temperature=temperature).sample(row, [])


def test_the_row_itself_is_not_changed() -> None:
    row = np.arange(5, dtype=np.float32)
    sampler(5, temperature=1.0, logit_bias={1: 3.0}, top_k=2).sample(row, [])
    assert row.tolist() == [0, 1, 2, 3, 4]


def test_seeds() -> None:
    row = np.zeros(1000, np.float32)

    def ids(seed: int | None, index: int) -> list[int]:
        one = sampler(1000, index, seed=seed)
        return [one.sample(row, []) for _ in range(8)]

    assert ids(7, 0) == ids(7, 0)
    assert ids(-7, 0) == ids(-7, 0)
    assert len({tuple(ids(7, 0)), tuple(ids(7, 1)), tuple(ids(8, 0)), tuple(ids(None, 0))}) == 4
    assert ids(None, 0) != ids(None, 0)


def test_typical_prefers_the_average() -> None:
    # One id is far more likely than its information would suggest; the many others are typical.
    row = np.log(np.array([0.4] + [0.1] * 6, np.float32))
    assert 0 not in possible(row, typical_p=0.5)


def test_draws_follow_the_distribution() -> None:
    row = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    counts = np.zeros(3)
    for uniform in np.linspace(0, 1, 2000, endpoint=False):
        counts[draw(row, Sampling(max_tokens=1), uniform)] += 1
    assert counts / 2000 == pytest.approx([0.5, 0.3, 0.2], abs=0.01)


@given(rows)
def test_greedy_is_argmax(row: Logits) -> None:
    assert sampler(row.size, temperature=0.0).sample(row, []) == int(row.argmax())


@given(rows, uniforms)
def test_top_k_of_one_is_a_maximum(row: Logits, uniform: float) -> None:
    assert row[draw(row, Sampling(max_tokens=1, top_k=1), uniform)] == row.max()


@given(rows, st.integers(1, 40))
def test_largest(row: Logits, count: int) -> None:
    count = min(count, row.size)
    array = largest(row, count)
    assert len(set(array.tolist())) == count
    assert sorted(row[array].tolist()) == sorted(row.tolist())[-count:]


@given(rows, st.integers(1, 40), uniforms)
def test_top_k_keeps_k(row: Logits, top_k: int, uniform: float) -> None:
    token = draw(row, Sampling(max_tokens=1, top_k=top_k), uniform)
    assert int((row > row[token]).sum()) < top_k


@given(rows, st.floats(0.01, 0.999), uniforms)
def test_top_p_stays_in_the_nucleus(row: Logits, top_p: float, uniform: float) -> None:
    token = draw(row, Sampling(max_tokens=1, top_p=top_p), uniform)
    probabilities = softmax(row).astype(np.float64)
    # Logits that differ in their last bit have the same weight.
    likelier = probabilities > probabilities[token] * (1 + 1e-5)
    assert probabilities[likelier].sum() < top_p + 1e-5


@given(rows, st.floats(0.001, 1), st.floats(0.1, 3), uniforms)
def test_min_p(row: Logits, min_p: float, temperature: float, uniform: float) -> None:
    token = draw(row, Sampling(max_tokens=1, min_p=min_p, temperature=temperature), uniform)
    assert (row[token] - row.max()) / temperature >= math.log(min_p) - 1e-3


@settings(max_examples=200)
@given(
    rows, st.floats(0.05, 5), st.floats(0.01, 1), st.integers(0, 50), st.floats(0.01, 1), uniforms, st.data()
)
def test_what_is_masked_never_comes(
    row: Logits,
    temperature: float,
    top_p: float,
    top_k: int,
    typical_p: float,
    uniform: float,
    data: st.DataObject,
) -> None:
    allowed = data.draw(st.sets(st.integers(0, row.size - 1), min_size=1))
    masked = np.full_like(row, -np.inf)
    masked[list(allowed)] = row[list(allowed)]
    sampling = Sampling(max_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k, typical_p=typical_p)
    assert draw(masked, sampling, uniform) in allowed


@given(rows, st.integers(0, 20), st.data())
def test_logprobs_are_those_of_softmax(row: Logits, top: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, row.size - 1))
    entry = logprob(row, token, top)
    with np.errstate(divide="ignore"):
        reference = row.astype(np.float64) - row.max()
    reference -= math.log(np.exp(reference).sum())
    assert entry.logprob == pytest.approx(reference[token], abs=1e-3)
    assert entry.logprob <= 1e-6
    assert len(entry.top) == min(top, row.size)
    values = [value for _, value in entry.top]
    assert values == sorted(values, reverse=True)
    assert not any(math.isnan(value) for value in values)
    if top:
        assert values[0] == pytest.approx(reference.max(), abs=1e-3)
