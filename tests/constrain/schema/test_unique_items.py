"""Lists without repetition: what a grammar cannot say is watched token by token."""

import json

import pytest

from dragoman.constrain.constraint import Constraint
from dragoman.errors import BadRequest, ConstraintFailed
from tests.constrain.walks import PIECES, allowed, vocabulary, walk

KNOWN = vocabulary()
STRINGS = Constraint.from_json_schema({"type": "array", "items": {"type": "string"}, "uniqueItems": True})
CHOICES = Constraint.from_json_schema(
    {"type": "array", "items": {"enum": ["a", "ab", "b"]}, "uniqueItems": True, "minItems": 2}
)


@pytest.mark.parametrize("constraint", [STRINGS, CHOICES], ids=["strings", "choices"])
def test_whatever_is_sampled_there_is_no_repetition(constraint: Constraint) -> None:
    texts = [walk(constraint, KNOWN, seed) for seed in range(150)]
    lists = [json.loads(text) for text in texts if text is not None]
    assert len(lists) > 100
    assert [result for result in lists if len(set(result)) != len(result)] == []
    assert any(len(outcome) > 1 for outcome in lists)


def test_a_token_that_would_end_a_string_seen_before_is_forbidden() -> None:
    matcher = STRINGS.start(KNOWN)
    for byte in b'["a", "a':
        matcher.accept(byte)
    following = {PIECES[id_] for id_ in allowed(matcher)}
    assert b"b" in following and not any(piece.startswith(b'"') for piece in following if piece)


def test_a_token_with_two_equal_strings_in_it_is_not_taken() -> None:
    matcher = STRINGS.start(KNOWN)
    double = PIECES.index(b'["a", "a"')
    assert double not in allowed(matcher) and PIECES.index(b'["') in allowed(matcher)
    with pytest.raises(ConstraintFailed):
        matcher.accept(double)
    with pytest.raises(ConstraintFailed):
        allowed(matcher)


def test_copies_go_their_own_ways() -> None:
    one = STRINGS.start(KNOWN)
    for byte in b'["a", "':
        one.accept(byte)
    other = one.copy()
    for byte in b'b", "b':
        one.accept(byte)
    for byte in b'b", "c"]':
        other.accept(byte)
    assert other.is_accepting and not one.is_accepting


def test_it_cannot_be_put_into_a_grammar_that_nobody_watches() -> None:
    with pytest.raises(BadRequest):
        Constraint(f'start: "<" inner ">"\ninner: %lark {{\n{STRINGS.grammar}\n}}').start(KNOWN)


def test_lists_within_objects_and_lists_are_told_apart() -> None:
    inner = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "array", "items": {"properties": {"a": inner, "b": {"type": "array"}}}}
    constraint = Constraint.from_json_schema(schema)
    assert constraint.accepts('[{"a": ["x"], "b": ["y", "y"]}, {"a": ["x"]}]')
    assert not constraint.accepts('[{"a": ["x"]}, {"a": ["y", "x", "y"]}]')
