from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dragoman.turns.choice_reader import StopFinder

few_letters = st.text(alphabet="ab", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3, unique=True)


def run(stops: list[str], pieces: list[str], *, keep: bool = False) -> tuple[str, str | None]:
    finder = StopFinder(stops, keep=keep)
    shown = ""
    for piece in pieces:
        text, stop = finder.feed(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + finder.flush(), None


def naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """Grow the text by characters until it ends with a stop; the longest of several."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_stop_is_cut_off() -> None:
    assert run(["END"], ["some E", "ND more"]) == ("some ", "END")


def test_stop_is_kept_on_demand() -> None:
    assert run(["END"], ["some E", "ND more"], keep=True) == ("some END", "END")


def test_what_only_looked_like_a_stop_comes_out() -> None:
    assert run(["END"], ["EN", "EN"]) == ("ENEN", None)


def test_nothing_that_may_become_a_stop_is_shown() -> None:
    assert StopFinder(["END"]).feed("some EN") == ("some ", None)


@given(stop_lists, few_letters)
def test_finds_what_a_naive_search_finds(stops: list[str], text: str) -> None:
    assert run(stops, [text]) == naive(stops, text)


@given(stop_lists, few_letters, st.lists(st.integers(0, 24), max_size=6))
def test_cuts_change_nothing(stops: list[str], text: str, places: list[int]) -> None:
    bounds = [0, *sorted(min(index, len(text)) for index in places), len(text)]
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    assert run(stops, pieces) == run(stops, [text])
