"""What is new in the texts of an engine: nothing is lost, and nothing comes twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.steps import DeltaExtractor, OutputMode
from dragoman.errors import EngineFailed

words = st.lists(st.text("ab \n\u00e9", min_size=1, max_size=4), min_size=1, max_size=12)


def heard(texts: list[str], growth: OutputMode) -> str:
    growing = DeltaExtractor(growth)
    return "".join(growing.add(text, last=at == len(texts) - 1) for at, text in enumerate(texts))


def wholes(parts: list[str]) -> list[str]:
    return ["".join(parts[: at + 1]) for at in range(len(parts))]


@given(words, words)
def test_whole_texts_are_heard_once(parts: list[str], more: list[str]) -> None:
    growth = OutputMode()
    assert heard(wholes(parts), growth) == "".join(parts)
    assert heard(wholes(more), growth) == "".join(more)


@given(words)
def test_pieces_are_all_heard_where_it_is_known(parts: list[str]) -> None:
    assert heard(parts, OutputMode(pieces=True)) == "".join(parts)


def test_pieces_are_known_by_the_first_that_does_not_go_on() -> None:
    growth = OutputMode()
    assert heard([" ", " ", " a", "b", "b"], growth) == "  " + " a" + "bb"
    assert growth.pieces
    assert heard(["x", "x", "x"], growth) == "xxx"


def test_an_end_without_text_loses_nothing() -> None:
    assert heard(["Hel", ""], OutputMode()) == "Hel"
    assert heard(["H", "He", ""], OutputMode()) == "He"
    assert heard(["Hello", "Hello there", ""], OutputMode()) == "Hello there"


def test_a_part_of_a_character_waits() -> None:
    growing = DeltaExtractor(OutputMode(pieces=False))
    assert [growing.add(text, last=False) for text in ("caf\ufffd", "caf\u00e9", "caf\u00e9!")] == [
        "caf",
        "\u00e9",
        "!",
    ]


def test_a_stop_string_that_is_taken_back_changes_nothing() -> None:
    assert heard(["Hello", "Hello STOP", "Hello "], OutputMode()) == "Hello STOP"


def test_texts_that_are_neither_are_an_error() -> None:
    with pytest.raises(EngineFailed, match="do not extend each other"):
        heard(["Hello", "Hello there", "Bye"], OutputMode())
