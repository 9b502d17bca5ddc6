"""JSON in pieces is JSON in one go."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.api import reply
from dragoman.api.reply import encode_json

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    PLAIN, lambda each: st.lists(each) | st.dictionaries(st.text(), each) | st.tuples(each, each)
)


@given(VALUES, st.integers(1, 4))
def test_pieces_are_the_whole(value: object, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reply, "PIECE", piece)
        assert encode_json(value) == msgspec.json.encode(value)


def test_a_list_that_begins_with_a_short_text_may_have_a_long_one() -> None:
    value = ["a", "b" * 200_000, {"c": [1, "d" * 100_000]}]
    assert json.loads(encode_json(value)) == value
