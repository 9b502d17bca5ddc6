"""Patterns mean what they mean to `re`, take one pass, and do not care how the text is cut."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.dialects.streaming_regex import compile_literals, compile_pattern
from dragoman.errors import SettingsError

PATTERNS = [
    r"<tool_call>\s*<function=(?P<name>\w+)>",
    r"<a\b[^>]*?\bname=\"(?P<name>[^\"]+)\">",
    r"(?:^|<a>\s*)b",
    r"\n?</a>",
    r"a.*?b",
    r"a(?P<x>.*)b",
    r"(?P<x>a|ab)(?P<y>c|bcd)?",
    r"a{2,3}b{1}c?",
    r"[ab<]+?>",
    r"\s*(?:<a>|<b>)",
    r"a(?=b|$)",
    r"(?P<key>\w+)=(?P<value>.*?)\s*;",
]
TEXTS = st.text(alphabet='ab<>/= \n;"cd', max_size=40)


def spans(pattern: str, text: str) -> list[tuple[int, int, dict[str, str]]]:
    items = compile_pattern(pattern, "test").find_all(text)
    return [(one.start, one.end, {k: text[a:b] for k, (a, b) in one.groups.items()}) for one in items]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=TEXTS)
def test_matches_are_those_of_re(pattern: str, text: str) -> None:
    expected = [
        (one.start(), one.end(), {k: v for k, v in one.groupdict().items() if v is not None})
        for one in re.finditer(pattern, text, re.DOTALL)
    ]
    # `$` of `re` is also before a newline at the end; here the end is the end.
    if not (text.endswith("\n") and "$" in pattern):
        assert spans(pattern, text) == expected


@pytest.mark.parametrize("pattern", [r"(?:a|a)*b", r"(?:a*)*b", r"(?:a|aa)+b", r"a*a*a*a*b", r"(?:\s*)*x"])
def test_no_pattern_takes_long(pattern: str) -> None:
    began = time.perf_counter()
    assert spans(pattern, "a" * 20_000) == []
    assert time.perf_counter() - began < 2.0


def test_longest_literal_wins() -> None:
    pattern = compile_literals(("<a", "<a>", "b"), "test")
    assert [(one.start, one.end) for one in pattern.find_all("x<a>b<a")] == [(1, 4), (4, 5), (5, 7)]


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        (r"(a)\1", "unsupported class or escape"),
        (r"(?<=a)b", "group"),
        (r"(?!a)b", "group"),
        (r"(?=a)b", "ahead"),
        (r"a++", "repeat"),
        (r"(a", "closed"),
        (r"a)", "unmatched"),
        (r"*a", "repeats nothing"),
        (r"a{500}", "more than"),
        (r"((((a{99}){99}){99}){99})", "too large"),
        (r"((((){99}){99}){99}){99}", "too large"),
        ("(" * 400 + ")" * 400, "nested too deeply"),
        (r"[z-a]", "class"),
        ("a" * 1001, "1001 characters"),
        (r"(?P<a>x)(?P<a>y)", "two groups"),
    ],
)
def test_what_is_not_supported_is_refused(pattern: str, word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        compile_pattern(pattern, "fields.x.open_pattern")
