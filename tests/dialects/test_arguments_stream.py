"""Arguments are told as they are written, wherever it is certain by then that they are those of a call."""

import pytest

from dragoman.dialects.declarations import Dialect
from dragoman.dialects.parser import Parser
from dragoman.dialects.registry import get_dialect
from dragoman.dialects.render import render
from dragoman.types import Answer
from tests.support.dialects import NAMES, call, tool

LONG = "word " * 60
TOOLS = [tool("f", s={"type": "string"})]
AT_ONCE = {"minimax_m3": "a wrong closing tag makes the whole block text"}
CALLING = [name for name in NAMES if get_dialect(name).has_calls]
MOST_BEHIND = 40


def most_behind(dialect: Dialect) -> int:
    """How much of a long value was written at most and not told."""
    text = render(dialect, Answer(calls=[call("f", f'{{"s": "{LONG}"}}')]))
    begins, parser, value, most = text.index(LONG), Parser(dialect, TOOLS), "", 0
    for at, character in enumerate(text[: begins + len(LONG)]):
        value += "".join(event.text for event in parser.feed(character) if event.kind == "call_arguments")
        most = max(most, at + 1 - begins - value.count("word ") * len("word "))
    return most


@pytest.mark.parametrize("name", [name for name in CALLING if name not in AT_ONCE])
def test_arguments_are_told_as_they_are_written(name: str) -> None:
    assert most_behind(get_dialect(name)) <= MOST_BEHIND


@pytest.mark.parametrize("name", AT_ONCE)
def test_those_that_wait_cannot_but_wait(name: str) -> None:
    assert most_behind(get_dialect(name)) == len(LONG)
