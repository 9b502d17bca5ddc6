"""Expressions mean what ECMA 262 says, whatever llguidance would read into them."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.grammar.expressions import PatternError, read_pattern

CASES: dict[str, tuple[list[str], list[str]]] = {
    "^[a&&b]$": (["a", "&", "b"], ["&&"]),
    "^[a[b]$": (["[", "a", "b"], ["]"]),
    "^[a-c-z]$": (["-", "b", "z"], ["y"]),
    "^[\\d-z]$": (["-", "5", "z"], ["y"]),
    "^[+--]$": (["+", ",", "-"], ["*"]),
    "^\\w\\d$": (["a1"], ["é1", "a٣"]),
    "^\\s$": ([" ", "\t", "\ufeff", "\u2028"], ["\u0085", "a"]),
    "^[^\\s]$": (["a", "\u0085"], ["\ufeff"]),
    "^.$": (["a", "😀"], ["\n", "\u2028"]),
    "^[^]$": (["a", "\n"], ["ab"]),
    "^a{,2}$": (["a{,2}"], ["a", "aa"]),
    "^\\ud83d\\ude00\\u{1F600}$": (["😀😀"], ["😀"]),
    "^(?<n>a)(?:b)$": (["ab"], ["a"]),
    "^\\/\\-\\$$": (["/-$"], ["\\/"]),
    "a|^b": (["xa", "b"], ["xb"]),
    "^(?i)ab$": (["ab", "AB"], ["ax"]),
    "^a(?i:b)c$": (["abc", "aBc"], ["Abc"]),
    "^a\\x01?b$": (["ab"], ["b"]),
}
REFUSED = [
    "(?=a)",
    "(?<!a)b",
    "\\bx",
    "(a)\\1",
    "\\k<n>",
    "[]",
    "(",
    ")",
    "[a",
    "\\",
    "\\q",
    "\\ud83d",
    "(?s:.)",
    "(" * 200,
]


@pytest.mark.parametrize("pattern", CASES)
def test_in_a_schema(pattern: str) -> None:
    constraint = Constraint.from_json_schema({"type": "string", "pattern": pattern})
    accepted, rejected = CASES[pattern]
    assert [text for text in accepted if not constraint.accepts(json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in rejected if constraint.accepts(json.dumps(text, ensure_ascii=False))] == []


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern[:10])
def test_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        read_pattern(pattern)


@pytest.mark.parametrize("pattern", ["^a\\x01b$", "^a\\x7fb$", "^a[\\x01\\x02]b$", "^a\x01b$"])
def test_a_character_that_cannot_be_written_is_not_skipped(pattern: str) -> None:
    constraint = Constraint.from_json_schema({"type": ["string", "null"], "pattern": pattern})
    assert not constraint.accepts('"ab"')


ATOMS = st.sampled_from(
    ["a", "b", "-", "&", "[ab]", "[^a]", "[a-c&]", "(?:ab)", "\\d", "\\.", ".", "(?:x{2})", "1"]
)
PATTERNS = st.lists(st.tuples(ATOMS, st.sampled_from(["", "", "*", "+", "?"])), min_size=1, max_size=5).map(
    lambda parts: "".join(atom + count for atom, count in parts)
)


@given(PATTERNS, st.text("ab-&1.xc", max_size=6))
def test_like_python_where_both_mean_the_same(pattern: str, text: str) -> None:
    whole = Constraint.from_regex(pattern).accepts(text)
    assert whole == (re.fullmatch(pattern, text) is not None)
    outcome = Constraint.from_json_schema({"type": "string", "pattern": pattern}).accepts(json.dumps(text))
    assert outcome == (re.search(pattern, text) is not None)
