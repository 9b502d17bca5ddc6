"""The runner over OpenVINO by itself: what its pages hold, and what can be seen of it from outside."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dragoman.engines.local.openvino.compiled_graph import compile_graph
from dragoman.engines.local.openvino.conversion_cache import ensure_converted
from dragoman.engines.local.openvino.runner import OpenVinoRunner
from dragoman.engines.local.runner import PagedRunner, StepInterrupted, StepRows
from dragoman.engines.sampling import Logits
from dragoman.engines.sampling.sampler import BLOCK
from tests.engines.local.openvino.conftest import write_model

PROMPT = list(range(2000, 2050))


@pytest.fixture(scope="module")
def graph(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_converted(write_model(tmp_path_factory.mktemp("models") / "model.gguf", weights))


@pytest.fixture(scope="module")
def runner(graph: Path) -> Iterator[OpenVinoRunner]:
    compiled = compile_graph(graph, threads=1, kv_cache="int8")
    open_vino_runner = OpenVinoRunner(compiled, slots=2, context=128, pages=16, batch=64)
    open_vino_runner.warm_up()
    yield open_vino_runner
    open_vino_runner.close()


def read(runner: OpenVinoRunner, pages: list[int], start: int, tokens: list[int]) -> Logits:
    rows = StepRows()
    rows.extend(0, start, tokens, [False] * (len(tokens) - 1) + [True])
    rows.tables[0] = pages
    logits: Logits = runner.step(rows)[0].copy()
    return logits


def test_it_is_a_runner_with_pages(runner: OpenVinoRunner) -> None:
    assert isinstance(runner, PagedRunner)


def test_where_the_pages_are_changes_nothing(runner: OpenVinoRunner) -> None:
    assert np.array_equal(read(runner, [0, 1], 0, PROMPT), read(runner, [9, 4], 0, PROMPT))


def test_the_largest_of_each_block_comes_with_the_logits(runner: OpenVinoRunner) -> None:
    logits = read(runner, [0, 1], 0, PROMPT)
    assert runner.block_stats is not None
    assert np.array_equal(runner.block_stats.maxima[0], logits.reshape(-1, BLOCK).max(axis=1))


def test_what_rows_weigh_is_summed_up_as_they_are_then(runner: OpenVinoRunner) -> None:
    rows = StepRows()
    rows.extend(0, 0, PROMPT, [True] * len(PROMPT))
    rows.tables[0] = [0, 1]
    logits, blocks = runner.step(rows), runner.block_stats
    assert blocks is not None
    logits[0, ::3] = -np.inf
    logits[1] = -np.inf
    peaks = np.maximum(logits.max(axis=1), np.finfo(np.float32).min)
    heat = np.linspace(0.5, 3, len(logits), dtype=np.float32)
    weights = np.exp((logits.astype(np.float64) - peaks[:, None]) * heat[:, None])
    assert np.allclose(blocks.totals(peaks, heat), weights.sum(axis=1), rtol=1e-6)


def write_four(runner: OpenVinoRunner, heat: float) -> Logits:
    """Four answers of one token each."""
    rows = StepRows()
    for slot in range(4):
        rows.add(slot, 0, PROMPT[slot], heat)
        rows.tables[slot] = [slot]
    return runner.step(rows)


def test_what_is_summed_up_ahead_is_what_is_asked_for(runner: OpenVinoRunner) -> None:
    for heat in (0.8, 1.25):
        # Of the first nobody asks.
        logits, blocks = write_four(runner, heat), runner.block_stats
    assert blocks is not None
    peaks = logits.max(axis=1)
    for asked in (1.25, 2.0, 1.25):
        weights = np.exp((logits.astype(np.float64) - peaks[:, None]) * asked)
        array = blocks.totals(peaks, np.full(4, asked, np.float32))
        assert np.allclose(array, weights.sum(axis=1), rtol=1e-6)
        logits -= 1
        peaks -= 1


def test_a_runner_may_be_closed_while_it_sums_up(graph: Path) -> None:
    runner = OpenVinoRunner(
        compile_graph(graph, threads=1, kv_cache="int8"), slots=4, context=64, pages=8, batch=8
    )
    for _ in range(3):
        write_four(runner, heat=1.0)
    runner.close()


def test_a_copied_page_goes_on_like_its_source(runner: OpenVinoRunner) -> None:
    read(runner, [0, 1], 0, PROMPT)
    runner.copy_page(1, 5)
    ours = read(runner, [0, 5], len(PROMPT), [7, 8])
    assert np.array_equal(ours, read(runner, [0, 1], len(PROMPT), [7, 8]))


def test_a_step_shows_from_another_thread(runner: OpenVinoRunner) -> None:
    before = runner.pulse
    seen: list[int] = []
    while runner.pulse == before:
        read(runner, [0, 1], 0, PROMPT)
    thread = threading.Thread(target=lambda: seen.append(runner.pulse))
    thread.start()
    thread.join()
    assert seen[0] > before


def test_an_interrupt_ends_the_warm_up(graph: Path) -> None:
    runner = OpenVinoRunner(
        compile_graph(graph, threads=1, kv_cache="int8"), slots=2, context=64, pages=8, batch=32
    )
    runner.interrupt()
    with pytest.raises(StepInterrupted):
        runner.warm_up()
    runner.close()
