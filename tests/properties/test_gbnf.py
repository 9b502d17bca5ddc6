"""Grammars at random: what is accepted is what a plain recognizer of the same grammar accepts."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dragoman.constrain.constraint import Constraint
from dragoman.constrain.grammar.gbnf import read_gbnf
from dragoman.constrain.grammar.trees import (
    Alternation,
    CharClass,
    Concatenation,
    LiteralText,
    Reference,
    Repetition,
    Tree,
)
from dragoman.errors import BadRequest

pytestmark = pytest.mark.thorough

ATOMS = st.sampled_from(
    ['"a"', '"b"', '"ab"', '"\\""', '"\\"" [ab]* "\\""', "[ab]", "[^a]", '[^"]', '""', "x", "root"]
)
PARTS = st.tuples(ATOMS, st.sampled_from(["", "", "", "*", "+", "?", "{1,2}"])).map(
    lambda p: f"({p[0]}){p[1]}"
)
SEQUENCES = st.lists(st.one_of(ATOMS, PARTS), min_size=1, max_size=4).map(" ".join)
OPTIONS = st.lists(SEQUENCES, min_size=1, max_size=3).map(" | ".join)
GRAMMARS = st.tuples(OPTIONS, OPTIONS).map(lambda two: f"root ::= {two[0]}\nx ::= {two[1]}")


class Recognizer:
    """Where a rule may end that begins at a place; found in rounds, so that recursion is no trouble."""

    def __init__(self, rules: dict[str, Tree], text: str) -> None:
        self.rules, self.text = rules, text
        self.known: dict[tuple[str, int], frozenset[int]] = {}

    def accepts(self) -> bool:
        before: dict[tuple[str, int], frozenset[int]] | None = None
        while before != self.known:
            before = dict(self.known)
            for name, rule in self.rules.items():
                for at in range(len(self.text) + 1):
                    self.known[name, at] = frozenset(self.ends(rule, at))
        return len(self.text) in self.known["root", 0]

    def ends(self, node: Tree, at: int) -> set[int]:
        match node:
            case LiteralText(text=text):
                return {at + len(text)} if self.text.startswith(text, at) else set()
            case CharClass(pattern=pattern):
                return {at + 1} if re.match(pattern, self.text[at:]) else set()
            case Reference(name=name):
                return set(self.known.get((name, at), ()))
            case Alternation(options=options):
                return {end for option in options for end in self.ends(option, at)}
            case Concatenation(parts=parts):
                numbers = {at}
                for part in parts:
                    numbers = {end for offset in numbers for end in self.ends(part, offset)}
                return numbers
            case Repetition(inner=part, least=least, most=most):
                return self.repeated(part, at, least, most)
        raise AssertionError(node)

    def repeated(self, part: Tree, at: int, least: int, most: int | None) -> set[int]:
        reached, numbers = {at}, {at} if least == 0 else set()
        for count in range(1, (most if most is not None else least + len(self.text) + 1) + 1):
            reached = {end for offset in reached for end in self.ends(part, offset)}
            numbers |= reached if count >= least else set()
        return numbers


@settings(max_examples=400, deadline=None)
@given(GRAMMARS, st.lists(st.text('ab"', max_size=6), min_size=1, max_size=8))
def test_accepted_like_the_grammar_says(grammar: str, texts: list[str]) -> None:
    try:
        constraint = Constraint.from_gbnf(grammar)
    except BadRequest:
        assume(False)
        raise
    rules = read_gbnf(grammar)
    assert {text: constraint.accepts(text) for text in texts} == {
        text: Recognizer(rules, text).accepts() for text in texts
    }
