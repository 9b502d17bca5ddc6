"""Ids are constrained exactly: parts of characters, special tokens, ends, and rows of any length."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.vocabulary import GrammarMatcher, Vocabulary
from dragoman.errors import ConstraintFailed

PIECES = [b"a", b"b", b"ab", b"\xc3", b"\xa9", "é".encode(), b"<|call|>", b"", b"", b"", b"<|call|>x"]
CALL, END, EMPTY, UNNAMED = 7, 8, 9, 6
KNOWN = Vocabulary(PIECES, {"<|call|>": CALL, "<|end|>": END}, [CALL, END])


def allowed(matcher: GrammarMatcher, size: int = len(PIECES)) -> set[int]:
    row = np.zeros(size, dtype=np.float32)
    matcher.mask(row)
    assert set(row.tolist()) <= {0.0, -np.inf}
    return {int(id_) for id_ in np.flatnonzero(row == 0)}


def after(constraint: Constraint, *ids: int) -> GrammarMatcher:
    matcher = constraint.start(KNOWN)
    for id_ in ids:
        matcher.accept(id_)
    return matcher


def test_a_character_may_come_in_parts() -> None:
    constraint = Constraint.from_regex("é")
    assert allowed(after(constraint)) == {3, 5}
    assert allowed(after(constraint, 3)) == {4}
    assert allowed(after(constraint, 3, 4)) == {CALL, END}


def test_ends_are_allowed_exactly_where_the_grammar_accepts() -> None:
    constraint = Constraint.from_regex("a*b?")
    assert {CALL, END} < allowed(after(constraint))
    assert not {CALL, END} & allowed(after(Constraint.from_regex("ab")))
    matcher = after(Constraint.from_regex("ab"), 2)
    assert matcher.is_complete and matcher.is_accepting and allowed(matcher) == {CALL, END}


def test_nothing_but_an_end_follows_an_end() -> None:
    matcher = after(Constraint.from_regex("a*"), 0, END)
    assert matcher.is_complete and matcher.is_accepting and allowed(matcher) == {CALL, END}


def test_text_is_never_a_special_token_and_the_other_way_round() -> None:
    text = Constraint.from_choice(["<|call|>"])
    assert allowed(after(text)) == {UNNAMED}
    marker = Constraint.from_lark('start: <|call|> "a"')
    assert allowed(after(marker)) == {CALL}
    assert allowed(after(marker, CALL)) == {0}
    assert allowed(after(Constraint.from_lark(f"start: <[{CALL}]>"))) == {CALL}


def test_an_end_id_may_be_a_marker_within_the_grammar() -> None:
    matcher = after(Constraint.from_lark('start: "a" (<|call|> "b")?'), 0)
    assert allowed(matcher) == {CALL, END}
    matcher.accept(CALL)
    assert allowed(matcher) == {1} and not matcher.is_accepting


def test_ids_without_bytes_are_never_allowed() -> None:
    assert EMPTY not in allowed(after(Constraint.from_regex("(?:.|é)*")))


def test_rows_longer_than_the_vocabulary_are_closed_at_their_end() -> None:
    assert allowed(after(Constraint.from_regex("a")), len(PIECES) + 100) == {0}


def test_a_matcher_that_failed_stays_so() -> None:
    matcher = after(Constraint.from_regex("ab"))
    with pytest.raises(ConstraintFailed):
        matcher.accept(1)
    assert matcher.error and not matcher.is_accepting
    for _ in range(2):
        with pytest.raises(ConstraintFailed):
            allowed(matcher)
    with pytest.raises(ConstraintFailed):
        matcher.accept(0)
    with pytest.raises(ConstraintFailed):
        allowed(matcher.copy())


def test_an_end_that_comes_too_early_is_refused() -> None:
    with pytest.raises(ConstraintFailed):
        after(Constraint.from_regex("ab"), 0, END)


def test_copies_go_their_own_ways() -> None:
    one = after(Constraint.from_regex("a(?:a|b)"), 0)
    other = one.copy()
    one.accept(0)
    other.accept(1)
    assert one.is_complete and other.is_complete


def test_wrong_ids_are_found_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="id 5"):
        Vocabulary([b"a"], {"<x>": 5}, [])


def test_what_has_to_come_is_foreseen_in_the_longest_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.constrain.vocabulary._FORESEEING_S", 60)
    matcher = after(Constraint.from_regex("abab(a|b)"))
    assert matcher.forced_tokens(9) == [2, 2]
    assert matcher.forced_tokens(1) == [2]
    assert allowed(matcher) == {0, 2}
    matcher.accept(0)
    assert matcher.forced_tokens(9) == [1, 2]


@pytest.mark.parametrize("pattern", ["a|b", "a*", "ab?b?", "(ab)?"])
def test_where_there_is_a_choice_nothing_is_foreseen(pattern: str) -> None:
    assert after(Constraint.from_regex(pattern)).forced_tokens(9) == []


def test_a_marker_is_foreseen() -> None:
    matcher = Constraint.from_lark("start: <|call|> /ab/").start(KNOWN)
    assert matcher.forced_tokens(9)[0] == CALL


@given(st.from_regex("[ab]{2,12}", fullmatch=True))
def test_what_is_foreseen_may_come(text: str) -> None:
    matcher = Constraint.from_choice([text, text + "ab"]).start(KNOWN)
    foreseen = matcher.forced_tokens(99)
    for id_ in foreseen:
        matcher.accept(id_)
    assert text.encode().startswith(b"".join(PIECES[id_] for id_ in foreseen))
