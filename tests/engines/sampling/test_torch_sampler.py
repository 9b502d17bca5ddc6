"""Rows that are chosen from together, held against the sampler that takes them one by one."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.engines.sampling import Logits, LogitsChange, RowChanges, sampler
from dragoman.engines.sampling.batched import SamplingBatch
from dragoman.engines.sampling.logits_processors import apply
from dragoman.types import Sampling

torch = pytest.importorskip("torch")

# Threads of torch wait for each other: on a machine that others use as well that takes long.
torch.set_num_threads(1)


def spaced(seed: int) -> Logits:
    """Forty values far enough apart that rounding does not decide who is in."""
    chosen: Logits = (np.random.default_rng(seed).permutation(81)[:40] / 4 - 10).astype(np.float32)
    return chosen


uniforms = st.floats(0, 1, exclude_max=True)
samplings = st.builds(
    Sampling,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
)
several = st.lists(st.tuples(st.integers(0, 2**32 - 1).map(spaced), samplings), min_size=1, max_size=5)


def drawn(rows: Any, asked: list[Sampling], numbers: list[float]) -> list[int]:
    from dragoman.engines.sampling.torch_sampler import draw_rows

    ids: list[int] = draw_rows(torch.tensor(np.array(rows, np.float32)), asked, numbers).tolist()
    return ids


def shares(row: list[float], **kinds: Any) -> dict[int, float]:
    """How often each id comes, over numbers that are spread evenly."""
    count = 4000
    asked = Sampling(max_tokens=1, **kinds)
    ids = drawn([row] * count, [asked] * count, [number / count for number in range(count)])
    return {id_: ids.count(id_) / count for id_ in set(ids)}


@settings(deadline=None)
@given(several, uniforms)
def test_the_ids_are_those_of_the_other_sampler(several: list[tuple[Any, Sampling]], uniform: float) -> None:
    rows, asked = [row for row, _ in several], [sampling for _, sampling in several]
    for row, sampling, id_ in zip(rows, asked, drawn(rows, asked, [uniform] * len(rows)), strict=True):
        near = (uniform, max(uniform - 1e-5, 0.0), min(uniform + 1e-5, 1 - 2**-53))
        assert id_ in {sampler.draw(row, sampling, number) for number in near}


def test_top_k_and_the_other_filters_leave_what_they_leave_one_by_one() -> None:
    row = spaced(0)
    kinds: dict[str, Any] = {"temperature": 2.0, "top_k": 8, "top_p": 0.8, "min_p": 0.05}
    asked = Sampling(max_tokens=1, **kinds)
    ids = [sampler.draw(row, asked, number / 4000) for number in range(4000)]
    mapping = shares(list(row), **kinds)
    assert mapping == pytest.approx({id_: ids.count(id_) / 4000 for id_ in set(ids)}, abs=1e-3)


def test_the_shares_are_those_of_the_weights() -> None:
    row = [0.0, 1.0, -1.0, 2.0]
    weights = np.exp(np.array(row) / 0.7)
    for id_, share in enumerate(weights / weights.sum()):
        assert shares(row, temperature=0.7)[id_] == pytest.approx(share, abs=1e-3)


def test_each_row_has_its_own_filters() -> None:
    row = [3.0, 2.0, 1.0, 0.0]
    kinds: list[dict[str, Any]] = [{}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.9}, {"temperature": 0.01}]
    asked = [Sampling(max_tokens=1, **kind) for kind in kinds]
    assert drawn([row] * 5, asked, [0.9999] * 5) == [3, 0, 0, 0, 0]


def test_equals_at_the_edge_of_top_p_are_kept_together_and_top_k_is_exact() -> None:
    row = [1.0, 1.0, 1.0, 0.0]
    assert set(shares(row, top_p=0.3)) == {0, 1, 2}
    assert len(shares(row, top_k=2)) == 2


def test_what_cannot_come_does_not_come_at_either_end() -> None:
    row = [-np.inf, 0.0, 0.0, -np.inf]
    assert drawn([row] * 2, [Sampling(max_tokens=1)] * 2, [0.0, 1 - 2**-53]) == [1, 2]


def test_log_probabilities_are_told_of_those_that_ask() -> None:
    from dragoman.engines.sampling.torch_sampler import choose

    rows = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    asked = [Sampling(max_tokens=1, temperature=0.0, logprobs=count) for count in (None, 0, 4)]
    (_, nothing), (second, own), (third, more) = choose(torch.tensor(rows), asked, [0.0] * 3)
    assert nothing is None
    for logprob, expected in (
        (own, sampler.logprob(rows[1], second, 0)),
        (more, sampler.logprob(rows[2], third, 4)),
    ):
        assert logprob is not None
        assert logprob.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [id_ for id_, _ in logprob.top] == [id_ for id_, _ in expected.top]


def test_equally_likely_ids_are_told_in_their_order() -> None:
    from dragoman.engines.sampling.torch_sampler import choose

    asked = [Sampling(max_tokens=1, temperature=0.0, logprobs=3)]
    ((_, logprob),) = choose(torch.tensor([[1.0, 2.0, 2.0]]), asked, [0.0])
    assert logprob is not None
    assert [id_ for id_, _ in logprob.top] == [1, 2, 0]


changes = st.lists(
    st.tuples(
        st.lists(st.integers(0, 39), min_size=1, max_size=12, unique=True),
        st.sampled_from(["add", "scale", "forbid", "alone"]),
    ),
    max_size=4,
)


def change_of(ids: list[int], kind: str) -> LogitsChange:
    indices = np.array(ids)
    if kind in ("add", "forbid"):
        amounts = np.full(indices.size, -np.inf if kind == "forbid" else -1.25, np.float32)
        return LogitsChange(indices, amounts)
    return LogitsChange(indices, factor=1.7) if kind == "scale" else LogitsChange(indices, alone=True)


@settings(deadline=None)
@given(st.lists(st.tuples(changes, st.none() | st.integers(0, 2**40 - 1)), min_size=1, max_size=4))
def test_rows_are_changed_as_one_by_one(asked: list[tuple[Any, int | None]]) -> None:
    from dragoman.engines.sampling.torch_sampler import chosen_ids, edit

    rules = []
    for several, bits in asked:
        words = None if bits is None else np.array([bits & (2**32 - 1), bits >> 32], np.uint32)
        rules.append(RowChanges([change_of(*one) for one in several], words))
    rows = np.stack([spaced(seed) for seed in range(len(rules))])
    expected = rows.copy()
    for row, rule in zip(expected, rules, strict=True):
        apply(row, rule.changes)
        if rule.bitmask is not None:
            row[np.unpackbits(rule.bitmask.view(np.uint8), bitorder="little")[:40] == 0] = -np.inf
    result = edit(torch.tensor(rows), rules)
    np.testing.assert_array_equal(result.numpy(), expected)
    greedy = Sampling(max_tokens=1, temperature=0.0)
    positions = [*range(len(rules))]
    drawn = SamplingBatch([*positions, 0, 0], [greedy] * (len(rules) + 2), [0.0] * (len(rules) + 2))
    drawn.row_changes, drawn.known = dict(zip(positions, rules, strict=True)), {len(rules): 7}
    ids = chosen_ids(torch.tensor(np.stack([*rows, rows[0], rows[0]])), drawn).tolist()
    best = [-1 if row.max() == -np.inf else int(row.argmax()) for row in expected]
    assert ids == [*best, 7, int(rows[0].argmax())]
