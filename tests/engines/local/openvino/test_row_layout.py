"""A row has the same bits whoever is beside it, however its prompt was cut, and whatever was guessed."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.engines.local.openvino.adapters import read_adapters
from dragoman.engines.local.openvino.architectures import OpenVinoUnsupported
from dragoman.engines.local.openvino.compiled_graph import compile_graph
from dragoman.engines.local.openvino.conversion_cache import ensure_converted
from dragoman.engines.local.openvino.row_layout import READ, Layout
from dragoman.engines.local.openvino.runner import OpenVinoRunner
from dragoman.engines.local.runner import StepRows
from dragoman.engines.sampling import Logits
from tests.engines.local.openvino.conftest import write_adapter, write_model

PROMPT, ANSWER = list(range(2000, 2075)), [7, 8, 9, 10, 11, 12]
PLACES = [3, 1, 4]
"""The pages of the one that is asked about; others have those from 5 on."""
LENGTH = len(PROMPT) + len(ANSWER)


CASES = [
    ("llama", "int8", 2, 0),
    ("llama", "f16", 1, 0),
    ("llama", "bf16", 2, 0),
    ("llama", "int8", 2, 2),
    ("qwen3moe", "int8", 2, 0),
    ("four bits", "int8", 2, 0),
]
"""Architecture, keys and values, threads and adapters."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def runner(
    request: pytest.FixtureRequest, weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenVinoRunner]:
    architecture, kv_cache, threads, adapters = request.param
    folder = tmp_path_factory.mktemp("models")
    few = architecture == "four bits"
    architecture = "llama" if few else architecture
    file = write_model(folder / "model.gguf", weights, architecture, four_bits=few)
    files = {name: str(write_adapter(folder / name, file)) for name in "ab"[:adapters]}
    read = read_adapters(files, architecture)
    try:
        compiled = compile_graph(ensure_converted(file), threads=threads, kv_cache=kv_cache, adapters=read)
    except OpenVinoUnsupported:
        pytest.skip(f"THIS CPU HAS NO {kv_cache}, so keys and values in it are not tested")
    open_vino_runner = OpenVinoRunner(compiled, slots=8, context=128, pages=32, batch=128)
    open_vino_runner.warm_up()
    with closing(open_vino_runner):
        yield open_vino_runner


@pytest.fixture(scope="module")
def alone(runner: OpenVinoRunner) -> Logits:
    return logits(runner, steps([], 0, None, runner.adapters))


def steps(
    sizes: list[int], guesses: int, company: Random | None, names: tuple[str, ...]
) -> Iterator[StepRows]:
    """A prompt in pieces of these sizes, then its answer, so many tokens a step; and others.

    It has all the adapters, the others none.
    """
    adapters = tuple((name, 0.5) for name in names)
    positions = [(index, index + size) for index, size in _pieces(sizes)]
    positions += [(at, min(at + 1 + guesses, LENGTH)) for at in range(len(PROMPT), LENGTH, 1 + guesses)]
    for begin, end in positions:
        rows = StepRows()
        _add_others(rows, company, before=True)
        result = begin >= len(PROMPT)
        wanted = [position + 1 >= len(PROMPT) for position in range(begin, end)]
        rows.extend(1, begin, [*PROMPT, *ANSWER][begin:end], wanted, outcome=result)
        rows.tables[1] = PLACES[: -(-end // 32)]
        rows.adapters[1] = adapters
        _add_others(rows, company, before=False)
        yield rows


def _pieces(sizes: list[int]) -> Iterator[tuple[int, int]]:
    index = 0
    for size in [*sizes, len(PROMPT)]:
        if size := min(size, len(PROMPT) - index):
            yield index, size
        index += size


def _add_others(rows: StepRows, company: Random | None, *, before: bool) -> None:
    for slot in ((0,) if before else (2, 3)) if company else ():
        count = company.choice([0, 1, 1, 5, 40])  # type: ignore[union-attr]
        tokens = [company.randrange(40_000) for _ in range(count)]  # type: ignore[union-attr]
        rows.extend(slot, 0, tokens, [False] * count, outcome=count == 1 and not before)
        rows.tables[slot] = [5 + 2 * slot, 6 + 2 * slot]


def logits(runner: OpenVinoRunner, steps: Iterator[StepRows]) -> Logits:
    """Of the prompt's last token and the answer."""
    return np.concatenate([runner.step(rows).copy() for rows in steps])


@settings(max_examples=10)
@given(st.lists(st.integers(1, 64), max_size=6), st.integers(0, 5), st.none() | st.randoms())
def test_bits_are_those_of_the_sequence_alone(
    runner: OpenVinoRunner, alone: Logits, sizes: list[int], guesses: int, company: Random | None
) -> None:
    assert np.array_equal(logits(runner, steps(sizes, guesses, company, runner.adapters)), alone)


def laid_out(layout: Layout, rows: StepRows) -> list[int]:
    """How many rows each piece has."""
    return [int(size) for size in np.diff(layout.of(rows)[0]["subsequence_begins"])]


def test_rows_of_answers_are_pieces_of_their_own() -> None:
    rows = StepRows()
    rows.extend(0, 5, [1, 2, 3], [True] * 3, outcome=True)
    rows.extend(1, 0, [4, 5], [False] * 2)
    rows.tables.update({0: [0], 1: [1]})
    assert laid_out(Layout(32, 9), rows) == [1, 1, 1, 2]


def test_a_single_row_of_a_prompt_gets_another_behind_it() -> None:
    rows = StepRows()
    rows.extend(0, 31, [7], [True])
    rows.add(1, 3, 8)
    rows.tables.update({0: [4], 1: [5]})
    inputs, indices = Layout(32, 9).of(rows)
    assert inputs["position_ids"].tolist() == [31, 32, 3]
    assert inputs["block_indices"].tolist() == [4, 9, 5]
    assert indices.tolist() == [0, 2]


@pytest.mark.parametrize(("least", "pieces"), [(0, [1, 0]), (2, [1, 1, 0]), (6, [1, 5])])
def test_a_step_is_filled_up(least: int, pieces: list[int]) -> None:
    """And has a piece of no rows where it would have single ones only."""
    rows = StepRows()
    rows.add(0, 0, 7)
    rows.tables[0] = [0]
    layout = Layout(32, 9)
    layout.least = least
    assert laid_out(layout, rows) == pieces


@pytest.mark.parametrize(("least", "read"), [(0, 1), (6, 6)])
def test_rows_that_nobody_reads_are_told(least: int, read: int) -> None:
    """But for those that are there for the bits of others."""
    rows = StepRows()
    rows.add(0, 0, 7)
    rows.tables[0] = [0]
    layout = Layout(32, 9)
    layout.least = least
    assert layout.of(rows)[0][READ].tolist() == [read]
