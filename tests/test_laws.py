"""Laws that try too little fail."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.statistics import collector

from tests.support.laws import counted, tried

ROOT = Path(__file__).parent.parent


def thrown_away(number: int) -> None:
    assume(number < 50)


def nothing_to_try(number: int) -> None:
    tried(number < 50)


def enough(number: int) -> None:
    tried(number < 500)


def faults(law: Callable[[int], None]) -> list[str]:
    quiet = settings(max_examples=50, database=None, suppress_health_check=list(HealthCheck))
    # What is wrong with these is not told to the guard of this very test.
    with collector.with_value(None), counted() as texts:
        quiet(given(st.integers(0, 999))(law))()
    return texts


@pytest.mark.parametrize("law", [thrown_away, nothing_to_try])
def test_a_law_that_tries_too_little_is_found(law: Callable[[int], None]) -> None:
    assert "examples this law tried only" in faults(law)[0]


def test_a_law_that_tries_enough_is_none_of_them() -> None:
    assert faults(enough) == [""]


@pytest.mark.thorough
def test_such_a_law_fails(tmp_path: Path) -> None:
    file = tmp_path / "test_vacuous.py"
    file.write_text(
        "from hypothesis import given, strategies as st\n"
        "from tests.support.laws import tried\n"
        "@given(st.integers())\n"
        "def test_law(number): tried(False)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.laws", str(file)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "1 failed" in ran.stdout and "this law tried only 0" in ran.stdout
