import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.turns.choice_reader import Detokenizer, TokenTable

BYTES = TokenTable([bytes([byte]) for byte in range(256)])


def feed(data: bytes) -> list[str]:
    reader = Detokenizer(BYTES, skip_special=False)
    return [*map(reader.feed, data), reader.flush()]


def test_character_cut_between_ids_comes_whole() -> None:
    assert feed("é".encode()) == ["", "é", ""]


def test_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    assert feed("€".encode()[:2]) == ["", "", "\ufffd"]


def test_invalid_byte_becomes_a_replacement_and_the_rest_survives() -> None:
    assert "".join(feed(b"a\xffb")) == "a\ufffdb"


def test_special_token_inside_a_cut_character_does_not_break_it() -> None:
    pieces = TokenTable([b"\xc3", b"\xa9", b"<end>"], frozenset({2}))
    reader = Detokenizer(pieces, skip_special=True)
    assert [reader.feed(0), reader.feed(2), reader.feed(1)] == ["", "", "é"]


def test_special_tokens_are_shown_on_demand() -> None:
    pieces = TokenTable([b"a", b"<end>"], frozenset({1}))
    assert pieces.text([0, 1]) == "a<end>"
    assert pieces.text([0, 1], skip_special=True) == "a"


@pytest.mark.parametrize("skip", [True, False])
def test_a_marked_id_is_its_mark_whether_special_tokens_are_shown_or_not(skip: bool) -> None:
    pieces = TokenTable([b"a", b"<call>", b"<end>"], frozenset({1, 2})).marked({1: "\ud800"})
    assert pieces.text([0, 1, 2], skip_special=skip) == "a\ud800" + ("" if skip else "<end>")


def test_a_mark_ends_an_unfinished_character() -> None:
    pieces = TokenTable([b"\xc3", b"<call>"], frozenset({1})).marked({1: "\ud800"})
    assert pieces.text([0, 1], skip_special=True) == "\ufffd\ud800"


def test_marks_leave_the_pieces_they_were_made_from_alone() -> None:
    pieces = TokenTable([b"<call>"], frozenset({0}))
    pieces.marked({0: "\ud800"})
    assert pieces.text([0]) == "<call>"


@given(st.binary(max_size=64))
def test_any_bytes_decode_as_python_decodes_them(data: bytes) -> None:
    assert "".join(feed(data)) == data.decode("utf-8", "replace")


@given(st.text(max_size=32))
def test_no_piece_holds_half_a_character(text: str) -> None:
    assert "\ufffd" in text or all("\ufffd" not in piece for piece in feed(text.encode()))
