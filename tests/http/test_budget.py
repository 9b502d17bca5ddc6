"""Bytes that are held for clients: never more than there is room for, and nothing left when all is over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import DragomanError, Overloaded, Unavailable
from dragoman.http.admission import FREE_BYTES, ByteBudget

MOST = 100 * FREE_BYTES
SIZES = st.integers(0, 2 * MOST)
STEPS = st.lists(st.tuples(st.integers(0, 5), SIZES), max_size=50)


@given(STEPS)
def test_only_who_is_alone_has_more_than_there_is_and_no_key_has_more_than_its_share(
    steps: list[tuple[int, int]],
) -> None:
    budget = ByteBudget(MOST, 2, "Bodies")
    holdings = [budget.reserve("ab"[number % 2]) for number in range(6)]
    sizes = [0] * 6
    for number, size in steps:
        try:
            holdings[number].resize(size)
        except DragomanError:
            continue
        sizes[number] = size if size > FREE_BYTES else 0
        assert budget.used_bytes == sum(sizes)
        assert within(sizes, MOST)
        assert within(sizes[::2], budget.most_of_key) and within(sizes[1::2], budget.most_of_key)
    for holding in holdings:
        holding.release()
        holding.release()
    assert budget.used_bytes == 0


def within(sizes: list[int], most: int) -> bool:
    return sum(sizes) <= most or sum(map(bool, sizes)) == 1


def test_what_is_small_always_has_room() -> None:
    budget = ByteBudget(MOST, 1, "Bodies")
    budget.reserve("a").resize(MOST)
    budget.reserve("a").resize(FREE_BYTES)


@pytest.mark.parametrize(("keys", "error"), [(1, Unavailable), (2, Overloaded)])
def test_whose_fault_it_is_can_be_told(keys: int, error: type[DragomanError]) -> None:
    budget = ByteBudget(MOST, keys, "Bodies")
    budget.reserve("a").resize(MOST // 2)
    with pytest.raises(error):
        budget.reserve("a").resize(MOST // 2 + 1)


def test_what_must_be_held_is_counted_though_there_is_no_room() -> None:
    budget = ByteBudget(MOST, 1, "Replies")
    budget.reserve("a").resize(2 * MOST, checked=False)
    with pytest.raises(Unavailable):
        budget.reserve("a").resize(FREE_BYTES + 1)
