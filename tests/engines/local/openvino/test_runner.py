"""The runner over OpenVINO by itself: what its pages hold, and what can be seen of it from outside."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dragoman.engines.choosing.arrays import Logits
from dragoman.engines.local.openvino.compiled import compile_graph
from dragoman.engines.local.openvino.converted import converted
from dragoman.engines.local.openvino.runner import OpenVinoRunner
from dragoman.engines.local.runner import PagedRunner, Rows
from tests.engines.local.openvino.conftest import write_model

PROMPT = list(range(2000, 2050))


@pytest.fixture(scope="module")
def runner(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenVinoRunner]:
    model = write_model(tmp_path_factory.mktemp("models") / "model.gguf", weights)
    compiled = compile_graph(converted(model), threads=1, kv_cache="int8")
    made = OpenVinoRunner(compiled, slots=2, context=128, pages=16, batch=64)
    made.warm_up()
    yield made
    made.close()


def read(runner: OpenVinoRunner, pages: list[int], start: int, tokens: list[int]) -> Logits:
    rows = Rows()
    rows.extend(0, start, tokens, [False] * (len(tokens) - 1) + [True])
    rows.tables[0] = pages
    logits: Logits = runner.step(rows, ())[0].copy()
    return logits


def test_it_is_a_runner_with_pages(runner: OpenVinoRunner) -> None:
    assert isinstance(runner, PagedRunner)


def test_where_the_pages_are_changes_nothing(runner: OpenVinoRunner) -> None:
    assert np.array_equal(read(runner, [0, 1], 0, PROMPT), read(runner, [9, 4], 0, PROMPT))


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


def test_an_interrupt_between_steps_harms_none(runner: OpenVinoRunner) -> None:
    expected = read(runner, [0, 1], 0, PROMPT)
    runner.interrupt()
    assert np.array_equal(read(runner, [0, 1], 0, PROMPT), expected)
