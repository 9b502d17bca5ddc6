"""docs/figures.toml: rows that commands measure, and what `python -m bench.check` makes of them."""

import datetime
import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from bench import check, documented, ratios
from bench.documented import Command, Figure
from bench.errors import BenchError
from bench.process import ROOT
from bench.ratios import Ratio

COMMANDS = documented.read()


def command(**fields: object) -> Command:
    mapping: dict[str, object] = {
        "table": "",
        "bench": "stream",
        "quick": "--quick",
        "rounds": 1,
        "hardware": "two cores",
        "commit": "0" * 8,
        "date": datetime.date(2026, 1, 1),
        "figures": [Figure(name="a", key="a", ratio=3.0), Figure(name="b", key="b", ratio=1.0)],
    }
    return Command(**mapping | fields)  # type: ignore[arg-type]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """What a command measures, by key, in two rounds that differ; none where it is empty."""
    fields: dict[str, float] = {}
    monkeypatch.setattr(ratios, "OUT", tmp_path)

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if fields:
            one = [Ratio(key, "s", [ratio, 1.2 * ratio], [1.0, 1.0]) for key, ratio in fields.items()]
            ratios.write(command[2].removeprefix("bench."), one)
        return subprocess.CompletedProcess(command, 0 if fields else 1)

    monkeypatch.setattr(subprocess, "run", run)
    return fields


def test_the_file_is_as_it_is_written(tmp_path: Path) -> None:
    documented.write(COMMANDS, tmp_path / "figures.toml")
    assert (tmp_path / "figures.toml").read_text() == documented.FILE.read_text()


@pytest.mark.parametrize("one", COMMANDS, ids=lambda one: f"{one.bench} {one.arguments}")
def test_rows_are_of_commands_that_there_are(one: Command) -> None:
    assert (ROOT / "bench" / f"{one.bench}.py").exists()
    assert [key for key, count in Counter(figure.key for figure in one.figures).items() if count > 1] == []
    for figure in one.figures:
        assert figure.ratio > 0
        assert figure.least is None or figure.most is None or figure.least <= figure.ratio <= figure.most


def test_a_ratio_that_is_off_by_more_than_half_is_told(measured: dict[str, float]) -> None:
    measured |= {"a": 3.9, "b": 2.0}
    first, second = check.check(command(), full=False)
    assert not first.is_off and first.row[-1] == "true"
    assert second.is_off and second.row[-1] == "OFF by 2.20"
    measured |= {"a": 1.5}
    assert check.check(command(), full=False)[0].is_off


def test_a_command_that_fails_is_told(measured: dict[str, float]) -> None:
    assert all(one.is_off and one.failed for one in check.check(command(), full=False))


def test_what_cannot_be_run_here_is_left_out(measured: dict[str, float]) -> None:
    for left_out in (
        command(needs=["module:nothing_like_it"]),
        command(needs=["build/no"]),
        command(quick=None),
    ):
        assert not any(one.is_off or one.found for one in check.check(left_out, full=False))


def test_what_the_quick_form_lacks_is_left_out_and_the_full_one_has_it(measured: dict[str, float]) -> None:
    measured |= {"a": 3.0}
    assert not check.check(command(), full=False)[1].is_off
    assert check.check(command(), full=True)[1].failed


def test_what_was_measured_is_written(measured: dict[str, float]) -> None:
    measured |= {"a": 3.9, "b": 2.0}
    before = command()
    after = check.update(before, check.check(before, full=True), "1234abcd")
    assert (after.rounds, after.commit) == (2, "1234abcd")
    first = after.figures[0]
    assert (first.ratio, first.least, first.most, first.ours, first.unit) == (4.29, 3.9, 4.68, 4.29, "s")
    assert check.update(before, check.check(command(quick=None), full=False), "1234abcd") is before


def test_ratios_of_two_sides() -> None:
    assert Ratio("a", "tokens/s", [30.0, 33.0], [10.0, 10.0]).median == pytest.approx(3.15)
    assert Ratio("a", "ms", [10.0], [30.0], less_is_better=True).median == 3.0


def test_ratios_that_say_nothing_are_errors(measured: dict[str, float]) -> None:
    for wrong in (
        [Ratio("a", "s", [], [])],
        [Ratio("a", "s", [0.0], [1.0])],
        2 * [Ratio("a", "s", [1], [1])],
    ):
        with pytest.raises(BenchError):
            ratios.write("stream", wrong)


def test_what_is_written_is_read(measured: dict[str, float]) -> None:
    ratios.write("stream", [Ratio("a", "s", [1.0], [2.0])])
    assert ratios.read("stream")["a"].rounds == [0.5]
    assert json.loads(ratios.file_of("stream").read_bytes())[0]["key"] == "a"
