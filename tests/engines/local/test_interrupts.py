"""Real runners, interrupted at random moments, compute what an undisturbed run computes, to the last bit."""

import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.engines.local.opening import open_model
from dragoman.engines.local.options import LocalOptions
from dragoman.engines.local.runner import StepInterrupted, StepRows
from dragoman.engines.sampling import Logits
from tests.engines.local.openvino.conftest import write_model

STEPS = 1500
SIZES = (1, 2, 3, 5, 8, 16, 17, 40, 64)
OPTIONS = LocalOptions(slots=2, context=256, batch=64, threads=2)


@pytest.fixture(scope="module", params=["openvino", "llamacpp"])
def runner(
    request: pytest.FixtureRequest, weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    path = write_model(tmp_path_factory.mktemp("models") / "model.gguf", weights)
    options = LocalOptions(**{**_fields(OPTIONS), "runner": request.param})
    opened = open_model(path, options)
    with closing(opened.runner):
        opened.runner.warm_up()
        yield opened.runner


def _fields(options: LocalOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__struct_fields__}


def rows_of(size: int) -> StepRows:
    """A prompt of so many tokens in the first slot."""
    rows = StepRows()
    rows.extend(0, 0, [(7 * size + index) % 1000 for index in range(size)], [False] * (size - 1) + [True])
    rows.tables[0] = [*range(16)]
    return rows


def compute(runner: Any, size: int) -> Logits:
    if hasattr(runner, "truncate"):
        runner.truncate(0, 0)
    logits: Logits = runner.step(rows_of(size))[0].copy()
    return logits


class Interrupter:
    """A thread that interrupts at random moments, a few times in each millisecond."""

    def __init__(self, runner: Any, seed: int) -> None:
        self._runner = runner
        self._random = random.Random(seed)
        self._over = threading.Event()
        self.count = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._random.random() * 0.003):
            self._runner.interrupt()
            self.count += 1


@pytest.mark.thorough
def test_interrupts_change_no_bit(runner: Any) -> None:
    undisturbed = {size: compute(runner, size) for size in SIZES}
    order, interrupter, interrupted = random.Random(5), Interrupter(runner, 6), 0
    with interrupter.running():
        for _ in range(STEPS):
            size = order.choice(SIZES)
            try:
                logits = compute(runner, size)
            except StepInterrupted:
                interrupted += 1
                continue
            assert np.array_equal(logits, undisturbed[size]), size
    assert interrupter.count > STEPS // 10
    assert (interrupted > 0) == runner.interruptible


def test_a_runner_that_was_rebuilt_computes_the_same(runner: Any) -> None:
    before = {size: compute(runner, size) for size in SIZES}
    runner.reset()
    assert all(np.array_equal(compute(runner, size), before[size]) for size in SIZES)
    runner.rebuild()
    assert all(np.array_equal(compute(runner, size), before[size]) for size in SIZES)
