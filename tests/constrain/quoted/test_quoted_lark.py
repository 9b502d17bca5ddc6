"""A text in quotes is accepted exactly where the plain text is, by the grammar as llguidance reads it."""

import json
import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.grammar.lark_builder import LarkBuilder, is_possible
from dragoman.constrain.quoted.quoted_lark import COMMON, QuotedLark
from dragoman.errors import BadRequest
from tests.constrain.walks import vocabulary, walk

pytestmark = pytest.mark.thorough

SHORT = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
known = cache(vocabulary)


def escaped(grammar: str, quote: str = '"') -> Constraint:
    rules = LarkBuilder()
    return Constraint(rules.grammar(QuotedLark(rules, grammar, "grammar").write_escaped(quote)))


def raw(grammar: str, end: str, mark: str) -> Constraint:
    rules = LarkBuilder()
    return Constraint(rules.grammar(QuotedLark(rules, grammar, "grammar").write_raw(end, mark)))


def written(text: str, quote: str) -> str:
    return quote + "".join({**SHORT, quote: "\\" + quote}.get(one, one) for one in text) + quote


# Grammars at random, with what quotations have to do with in every part of them

characters = st.sampled_from([*"ab\n\"\\'\t </é"])
strings = st.text(characters, min_size=1, max_size=2).map(lambda text: json.dumps(text, ensure_ascii=False))
members = st.sampled_from(
    ["a", "b", r"\n", '"', r"\\", "'", r"\t", " ", "<", r"\/", "é", r"\w", r"\s", "a-z"]
)
classes = st.builds(
    lambda negated, some: f"[{negated}{''.join(some)}]",
    st.sampled_from(["", "^"]),
    st.lists(members, min_size=1, max_size=3, unique=True),
)
atoms = st.sampled_from(["a", "b", r"\n", '"', r"\\", r"\t", " ", "<", r"\/", "."]) | classes
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(["*", "+", "?", "{1,2}", "{2}"])),
    ),
    max_leaves=4,
)
expressions = st.builds("/{}/{}".format, patterns, st.sampled_from(["", "s", "i"]))
leaves = strings | expressions
terminals = (
    leaves | st.builds("{} & ~{}".format, expressions, leaves) | st.builds("{} {}?".format, leaves, leaves)
)
bodies = st.recursive(
    leaves | st.sampled_from(["A", "B", "x"]),
    lambda inner: st.one_of(
        st.builds("{} {}".format, inner, inner),
        st.builds("({} | {})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(["*", "+", "?", "~1..3", "{2}"])),
    ),
    max_leaves=4,
)
ignored = st.sampled_from(["", "", '\n%ignore " "', "\n%ignore /[ \\n]+/"])
grammars = st.builds("start: {}\nx: {}\nA: {}\nB: {}{}".format, bodies, leaves, terminals, terminals, ignored)


def compiled(grammar: str) -> Constraint | None:
    try:
        return Constraint.from_lark(grammar)
    except BadRequest:
        return None


def texts(plain: Constraint, seed: int) -> list[str]:
    """Texts of the language, and others that are near."""
    chance, items = random.Random(seed), []
    for number in range(4):
        text = walk(plain, known(), seed + number, 12)
        if text is not None:
            at = chance.randrange(len(text) + 1)
            items += [
                text,
                text[:at] + chance.choice("ab\n\"\\'\t <é") + text[at:],
                text[:at] + text[at + 1 :],
            ]
    return items


laws = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def unsaid(grammar: str, text: str) -> bool:
    """Quoted texts have short escapes only, and nothing that is ignored at their ends."""
    odd = any(one < " " and one not in SHORT for one in text)
    return odd or ("%ignore" in grammar and text != text.strip(" \n"))


@laws
@given(grammars, st.integers(0, 2**32), st.sampled_from("\"'"))
def test_in_quotes_the_same_texts_are_accepted(grammar: str, seed: int, quote: str) -> None:
    plain = compiled(grammar)
    wanted = [text for text in texts(plain, seed) if not unsaid(grammar, text)] if plain else []
    if plain is None or not any(map(plain.accepts, wanted)):
        return
    quoted = escaped(grammar, quote)
    for text in wanted:
        assert quoted.accepts(written(text, quote)) == plain.accepts(text), (grammar, text)


@laws
@given(grammars, st.integers(0, 2**32))
def test_what_is_accepted_in_quotes_is_a_text_of_the_grammar(grammar: str, seed: int) -> None:
    plain = compiled(grammar)
    if plain is None:
        return
    try:
        quoted = escaped(grammar)
    except BadRequest as error:
        assert "allows none" in str(error)
        return
    for number in range(4):
        text = walk(quoted, known(), seed + number, 30)
        assert text is None or plain.accepts(json.loads(text)), (grammar, text)


@laws
@given(grammars, st.integers(0, 2**32), st.sampled_from(["\n</parameter>", "</v>"]))
def test_between_tags_the_same_texts_are_accepted(grammar: str, seed: int, end: str) -> None:
    plain = compiled(grammar)
    if plain is None:
        return
    try:
        tagged = raw(grammar, end, end.strip())
    except BadRequest:
        return
    for text in texts(plain, seed):
        accepted = tagged.accepts(text + end)
        assert plain.accepts(text) or not accepted, (grammar, text)
        # What could become the tag is taken for it where the text may end.
        if not set(text) & {*"<\n"} and not unsaid(grammar, text):
            assert accepted == plain.accepts(text), (grammar, text)


# Single things


@pytest.mark.parametrize("name", COMMON)
def test_the_common_terminals_are_those_of_llguidance(name: str) -> None:
    text = f"%import common.{name}"
    for difference in (f"{name} & ~/{COMMON[name]}/", f"~{name} & /{COMMON[name]}/"):
        assert not is_possible(f"{difference}\n{text}")
    assert is_possible(f"{name} & /{COMMON[name]}/\n{text}")


def test_a_character_of_the_next_lexeme_is_not_lost() -> None:
    quoted = escaped('start: /.*/ "\\n" /.*/')
    assert quoted.accepts(r'"a\tb\n\\n"')
    assert quoted.accepts(r'"\n"')
    assert not quoted.accepts(r'"a\\nb"')
    assert not quoted.accepts(r'"\n\n"')


def test_case_is_not_that_of_the_escapes() -> None:
    quoted = escaped('start: "A\\n"i')
    assert quoted.accepts(r'"a\n"')
    assert quoted.accepts(r'"A\n"')
    assert not quoted.accepts(r'"a\N"')


def test_a_text_with_the_closing_tag_is_not_written() -> None:
    tagged = raw("start: /(?s:.*)/", "</v>", "</v>")
    assert tagged.accepts("a </b> < c</v>")
    assert not tagged.accepts("a</v>b</v>")


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "a"\n  | b\nb: %json {"minimum": -1.5}', "line 3: %json"),
        ('start: "a" <|end|>', "line 1: <|end|>"),
        ('start: x\n\nx[capture]: "a"', "line 3: x has options"),
        ("start: X\nX: /a b/x", "line 2: the expression has the flag x"),
        ('start: %lark {\nstart: "a"\n}', "line 1: %lark"),
    ],
)
def test_what_is_not_understood_is_named_by_its_line(grammar: str, why: str) -> None:
    with pytest.raises(BadRequest, match=r"'tools\[0\]\.custom\.format'") as caught:
        QuotedLark(LarkBuilder(), grammar, "tools[0].custom.format")
    assert why in str(caught.value)
    assert caught.value.code == "invalid_grammar"


def test_a_tag_in_pieces_is_refused() -> None:
    with pytest.raises(BadRequest, match="several lexemes"):
        raw('start: ("<" | "/" | "v" | ">")+', "</v>", "</v>")


def test_a_grammar_that_no_quotes_can_hold_is_refused() -> None:
    with pytest.raises(BadRequest, match="allows none"):
        escaped('start: "\\u0001"')
