"""What is packed comes back, however long it is, and never less of it."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.store.store import PIECE, pack, unpack


@given(st.binary(max_size=64), st.sampled_from([0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE]))
def test_what_was_packed_is_unpacked(start: bytes, more: int) -> None:
    events = start + b"a" * more
    assert unpack(pack(events)) == events


def test_what_was_cut_short_is_no_log() -> None:
    with pytest.raises(zlib.error):
        unpack(pack(b"abc" * 1000)[:-6])
