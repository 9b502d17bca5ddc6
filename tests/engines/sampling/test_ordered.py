"""Samplers in an order: each alone, beside llama.cpp's own where it has them, and the laws they share."""

import ctypes
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dragoman.engines.local import binding
from dragoman.engines.sampling import Logits
from dragoman.engines.sampling.filters import SamplerChain
from dragoman.engines.sampling.sampler import Sampler, draw
from dragoman.types import SAMPLER_ORDER, ExtraSamplers, Sampling

rows = arrays(np.float32, st.integers(2, 300), elements=st.floats(-20, 20, width=32))
uniforms = st.floats(0, 1, exclude_max=True)
# Probabilities 0.5, 0.25, 0.15, 0.07, 0.03.
ROW: Logits = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03], np.float32))


def possible(row: Logits, sampling: dict[str, Any] | None = None, **asked: Any) -> set[int]:
    """Every id that can come out."""
    chance = np.random.default_rng(1)
    ordered = SamplerChain(Sampling(max_tokens=1, **(sampling or {})), ExtraSamplers(**asked), row.size)
    return {ordered.draw(row, chance.random) for _ in range(800)}


def shares(row: Logits, sampling: dict[str, Any] | None = None, **asked: Any) -> list[float]:
    """How often each id comes out of evenly spread chances."""
    uniforms = iter(np.linspace(0, 1, 4_000, endpoint=False))
    ordered = SamplerChain(Sampling(max_tokens=1, **(sampling or {})), ExtraSamplers(**asked), row.size)
    counts = np.zeros(row.size)
    for _ in range(4_000):
        counts[ordered.draw(row, lambda: float(next(uniforms)))] += 1
    return [float(share) for share in counts / counts.sum()]


@given(rows, uniforms, st.sampled_from([0.3, 1.0, 1.7]), st.sampled_from([0.0, 0.1]), st.sampled_from([0, 5]))
def test_in_the_usual_order_it_is_the_usual_draw(
    row: Logits, uniform: float, temperature: float, min_p: float, top_k: int
) -> None:
    sampling = Sampling(max_tokens=1, temperature=temperature, min_p=min_p, top_k=top_k)
    ordered = SamplerChain(sampling, ExtraSamplers(), row.size).draw(row, lambda: uniform)
    usual = draw(row, sampling, uniform)
    # They round otherwise, so at an edge the neighbour may come out; it is as likely then.
    beside = (max(uniform - 1e-5, 0), min(uniform + 1e-5, 1 - 1e-9))
    assert ordered in {usual, *(draw(row, sampling, nearly) for nearly in beside)}


@given(rows, st.data())
def test_what_comes_out_was_possible(row: Logits, data: st.DataObject) -> None:
    asked = ExtraSamplers(
        order=tuple(data.draw(st.permutations(SAMPLER_ORDER))),
        top_n_sigma=data.draw(st.sampled_from([0.0, 0.5, 2.0])),
        top_a=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
        tfs=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        xtc_probability=data.draw(st.sampled_from([0.0, 1.0])),
        smoothing_factor=data.draw(st.sampled_from([0.0, 0.3])),
        dynatemp_range=data.draw(st.sampled_from([0.0, 0.5])),
        mirostat=data.draw(st.sampled_from([0, 1, 2])),
    )
    banned = data.draw(st.integers(0, row.size - 1))
    row = row.copy()
    row[banned] = -np.inf
    sampling = Sampling(max_tokens=1, top_p=0.9, typical_p=0.8, min_p=0.01, top_k=20)
    ordered = SamplerChain(sampling, asked, row.size)
    chances = iter([0.0, 0.5, 0.999999] * 3)
    assert all(ordered.draw(row, lambda: next(chances)) != banned for _ in range(3))


def test_top_a_goes_by_the_square_of_the_likeliest() -> None:
    assert possible(ROW, top_a=0.4) == {0, 1, 2}


def test_tfs_cuts_the_flat_end() -> None:
    flat: Logits = np.log(np.array([0.6, 0.3, 0.04, 0.03, 0.03], np.float32))
    assert possible(flat, tfs=0.97) == {0, 1}


def test_xtc_leaves_the_least_likely_of_the_top() -> None:
    assert possible(ROW, xtc_probability=1.0, xtc_threshold=0.1) == {2, 3, 4}


def test_xtc_leaves_a_single_one_above_the_threshold() -> None:
    assert 0 in possible(ROW, xtc_probability=1.0, xtc_threshold=0.4)


def test_smoothing_squares_the_distance() -> None:
    row: Logits = np.array([0, -1, -2], np.float32)
    weights = np.exp([0, -0.5, -2])
    assert shares(row, smoothing_factor=0.5) == pytest.approx(list(weights / weights.sum()), abs=2e-3)


def test_a_certain_model_is_cooled() -> None:
    certain, unsure = np.array([9, 0, 0], np.float32), np.array([0.1, 0, 0], np.float32)
    assert shares(certain, dynatemp_range=0.9)[0] > 0.999
    assert shares(unsure, dynatemp_range=0.9)[0] == pytest.approx(
        shares(unsure, {"temperature": 1.9})[0], abs=0.01
    )


def test_the_order_counts() -> None:
    cold = {"temperature": 0.5, "min_p": 0.2}
    first = possible(ROW, cold, order=("temperature", "min_p"))
    last = possible(ROW, cold, order=("min_p", "temperature"))
    assert (first, last) == ({0, 1}, {0, 1, 2})


def test_what_is_not_in_the_order_is_not_applied() -> None:
    assert possible(ROW, {"top_k": 1}, order=("temperature",)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_keeps_the_surprise_that_is_asked_for(version: Literal[1, 2]) -> None:
    chance = np.random.default_rng(7)
    row: Logits = (-1.1 * np.log(np.arange(1, 2001))).astype(np.float32)
    probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    sampling = Sampling(max_tokens=1)
    ordered = SamplerChain(sampling, ExtraSamplers(mirostat=version, mirostat_tau=3.0), row.size)
    surprises = [-math.log2(probabilities[ordered.draw(row, chance.random)]) for _ in range(1500)]
    # Zipf's law is an estimate, and what is left out makes the rest likelier than it was.
    assert 2.0 < np.mean(surprises[500:]) < 5.0


def test_a_seed_gives_the_same_with_chances_of_its_own() -> None:
    def drawn() -> list[int]:
        asked = ExtraSamplers(xtc_probability=0.5, dry_multiplier=0.8)
        sampling = Sampling(max_tokens=9, seed=5, samplers=asked)
        sampler = Sampler(sampling, 0, np.zeros(0, np.int32), 5, frozenset())
        output: list[int] = []
        for _ in range(20):
            output.append(sampler.sample(ROW, output))
        return output

    assert drawn() == drawn()


# llama.cpp's own


class _Data(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float))


class _Array(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(_Data)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


def llama_cpp(row: Logits, name: str, *arguments: Any) -> dict[int, float]:
    """What llama.cpp's sampler leaves of a row, with the probabilities of what is left."""
    library = ctypes.CDLL(str(binding.library_path()))
    make: Callable[..., Any] = getattr(library, f"llama_sampler_init_{name}")
    make.restype = ctypes.c_void_p  # type: ignore[attr-defined]
    library.llama_sampler_apply.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Array)]
    data = (_Data * row.size)(*(_Data(id_, float(logit), 0) for id_, logit in enumerate(row)))
    array = _Array(data, row.size, -1, False)
    library.llama_sampler_apply(make(*arguments), ctypes.byref(array))
    left = {array.data[at].id: array.data[at].logit for at in range(array.size)}
    left = {id_: logit for id_, logit in left.items() if logit > -math.inf}
    total = sum(math.exp(logit) for logit in left.values())
    return {id_: math.exp(logit) / total for id_, logit in left.items()}


PEERS: dict[str, tuple[str, list[Any], dict[str, Any], dict[str, Any]]] = {
    "top_n_sigma": ("top_n_sigma", [ctypes.c_float(1.0)], {}, {"top_n_sigma": 1.0}),
    "dynatemp": (
        "temp_ext",
        [ctypes.c_float(0.8), ctypes.c_float(0.5), ctypes.c_float(1.3)],
        {"temperature": 0.8},
        {"dynatemp_range": 0.5, "dynatemp_exponent": 1.3},
    ),
    "min_p": ("min_p", [ctypes.c_float(0.2), ctypes.c_size_t(1)], {"min_p": 0.2}, {}),
    "top_p": ("top_p", [ctypes.c_float(0.7), ctypes.c_size_t(1)], {"top_p": 0.7}, {}),
    "typical_p": ("typical", [ctypes.c_float(0.7), ctypes.c_size_t(1)], {"typical_p": 0.7}, {}),
}


@pytest.mark.parametrize("name", sorted(PEERS))
def test_it_is_as_in_llama_cpp(name: str) -> None:
    theirs, arguments, sampling, asked = PEERS[name]
    row: Logits = np.random.default_rng(3).normal(0, 2, 40).astype(np.float32)
    expected = llama_cpp(row, theirs, *arguments)
    ours = {id_: share for id_, share in enumerate(shares(row, sampling, **asked)) if share}
    assert ours == pytest.approx({id_: share for id_, share in expected.items() if id_ in ours}, abs=1e-3)
    assert all(share < 1e-3 for id_, share in expected.items() if id_ not in ours)
