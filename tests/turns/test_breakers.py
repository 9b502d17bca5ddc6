"""The ids in which a text stands."""

from hypothesis import given
from hypothesis import strategies as st

from dragoman.turns.spec import DryBreakerIndex

pieces = st.lists(st.binary(max_size=4), min_size=1, max_size=30)
texts = st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3)


@given(pieces, texts)
def test_they_are_those_that_contain_it(pieces: list[bytes], texts: list[str]) -> None:
    numbers = {at for at, piece in enumerate(pieces) if any(text.encode() in piece for text in texts)}
    assert DryBreakerIndex(pieces).ids(tuple(texts)) == numbers


@given(st.lists(st.text("ab", max_size=3).map(str.encode), min_size=1, max_size=30))
def test_a_text_over_two_pieces_is_in_none(pieces: list[bytes]) -> None:
    numbers = {at for at, piece in enumerate(pieces) if b"ab" in piece}
    assert DryBreakerIndex(pieces).ids(("ab",)) == numbers
