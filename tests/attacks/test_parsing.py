"""Answers that are made to be slow to read, through every dialect."""

import statistics
import time
from collections.abc import Sequence

import pytest

from dragoman.dialects.parser import Parser
from dragoman.dialects.registry import get_dialect
from tests.support.dialects import NAMES, TOOLS, markers

ROUNDS = 5
SHORT = 5_000
GROWTH = 3.0
"""Twice the text takes twice the time; three times, if the machine is in a bad mood; a square is four."""
REPEATED = ("[a(a=", "[", '{"name": "', "<", "</", "\\", '"', "((", "<|", "a='", "\n")


def seconds(dialect: str, text: str) -> float:
    """Of processor time, to read a text in small pieces."""
    parser = Parser(dialect, TOOLS)
    began = time.process_time()
    for at in range(0, len(text), 64):
        parser.feed(text[at : at + 64])
    parser.finish()
    return time.process_time() - began


def grows(dialect: str, repeated: str, opening: str = "") -> float:
    """How many times as long twice the text takes; short and long in turn, so that both have equal luck."""
    text = repeated * (SHORT // len(repeated))
    ratios: Sequence[float] = [
        seconds(dialect, opening + text * 2) / max(seconds(dialect, opening + text), 1e-4)
        for _ in range(ROUNDS)
    ]
    return statistics.median(ratios)


@pytest.mark.parametrize("dialect", NAMES)
def test_repetition_takes_time_in_proportion(dialect: str) -> None:
    marks = sorted(markers(get_dialect(dialect)))[:2]
    slow = {}
    for repeated in (*REPEATED, *marks):
        if seconds(dialect, repeated * (2 * SHORT // len(repeated))) < 0.01:
            continue  # So little that a ratio says nothing; a square of it would be more.
        if (ratio := grows(dialect, repeated)) > GROWTH:
            slow[repeated] = ratio
    assert not slow
