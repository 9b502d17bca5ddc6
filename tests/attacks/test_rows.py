"""The table of attacks and promises is whole, and every test that it names is there."""

import pytest

from tests.attacks.rows import ATTACKS, PROMISES, Row, exists, read

ROWS = read()
ALL = [*ROWS.attack, *ROWS.promise]


def test_no_row_is_missing() -> None:
    assert [row.number for row in ROWS.attack] == list(range(1, ATTACKS + 1))
    assert [row.number for row in ROWS.promise] == list(range(1, PROMISES + 1))


@pytest.mark.parametrize("row", ALL, ids=lambda row: f"{row.number} {row.what}")
def test_what_shows_a_row_is_there(row: Row) -> None:
    assert row.shown_by or row.why_not
    assert [one for one in row.shown_by if not exists(one)] == []


def test_a_test_that_is_not_there_would_be_noticed() -> None:
    assert not exists("attacks/test_rows.py::test_of_nothing")
    assert not exists("attacks/test_nothing.py::test_no_row_is_missing")
    assert not exists("torture/nothing")
