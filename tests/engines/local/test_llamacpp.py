"""The real runner: what its slots hold after it was moved."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dragoman.engines.local.gguf_model import LlamaModel
from dragoman.engines.local.llamacpp import KVDtype, KVDtypes, LlamaRunner, kept_kinds
from dragoman.engines.local.options import KVDtypeOption
from dragoman.engines.local.runner import StepRows
from dragoman.engines.sampling import Logits

ONE, OTHER = [5, 6, 7, 8, 9], [100, 200, 300]


@pytest.fixture(scope="module")
def runner(weights: Path) -> Iterator[LlamaRunner]:
    model = LlamaModel(weights)
    llama_runner = LlamaRunner(model, slots=4, context=256, batch=64, threads=1, flash_attention=True)
    yield llama_runner
    llama_runner.close()


def read(runner: LlamaRunner, slot: int, start: int, tokens: list[int]) -> Logits:
    rows = StepRows()
    rows.extend(slot, start, tokens, [False] * (len(tokens) - 1) + [True])
    logits: Logits = runner.step(rows)[0].copy()
    return logits


def fill(runner: LlamaRunner) -> None:
    for slot, tokens in ((0, ONE), (1, OTHER), (2, [])):
        runner.truncate(slot, 0)
        if tokens:
            read(runner, slot, 0, tokens)


def test_a_copy_goes_on_like_its_source(runner: LlamaRunner) -> None:
    fill(runner)
    runner.copy(0, 3, 4)
    assert np.allclose(read(runner, 3, 4, [11]), _fresh(runner, [*ONE[:4], 11]), atol=1e-2)


def test_slots_go_on_where_they_were_after_a_swap(runner: LlamaRunner) -> None:
    fill(runner)
    assert runner.swap(0, 1)
    assert np.allclose(read(runner, 1, len(ONE), [11]), _fresh(runner, [*ONE, 11]), atol=1e-2)
    assert np.allclose(read(runner, 0, len(OTHER), [11]), _fresh(runner, [*OTHER, 11]), atol=1e-2)


def test_a_swap_with_an_empty_slot_leaves_one_empty(runner: LlamaRunner) -> None:
    fill(runner)
    assert runner.swap(0, 2)
    assert np.allclose(read(runner, 2, len(ONE), [11]), _fresh(runner, [*ONE, 11]), atol=1e-2)
    assert runner._count(0) == 0


def _fresh(runner: LlamaRunner, tokens: list[int]) -> Logits:
    """The logits behind the same tokens, the last of them computed by itself, in a slot of their own."""
    runner.truncate(3, 0)
    read(runner, 3, 0, tokens[:-1])
    return read(runner, 3, len(tokens) - 1, tokens[-1:])


@pytest.mark.parametrize(
    ("kv_cache", "head", "several", "kept"),
    [
        ("auto", 64, True, "int8 keys and f16 values"),
        ("auto", 80, True, "f16 keys and values"),
        ("auto", 64, False, "f16 keys and values"),
        ("f16", 64, True, "f16 keys and values"),
        ("bf16", 80, True, "bf16 keys and values"),
        ("int8", 64, False, "int8 keys and values"),
    ],
)
def test_what_keys_and_values_are_kept_in(
    kv_cache: KVDtypeOption, head: int, several: bool, kept: str
) -> None:
    assert str(kept_kinds(kv_cache, head, several=several)) == kept


def test_int8_takes_half_and_its_scales() -> None:
    kinds: list[KVDtype] = ["f16", "int8"]
    assert [KVDtypes(keys, "f16").bytes_of(6400) for keys in kinds] == [6400, 4900]
