from functools import partial

from dragoman.constrain.constraint import Constraint
from dragoman.turns.constraints import LEAST_BYTES, GrammarCache
from dragoman.turns.spec import OutputConstraint, ParseOptions


def test_the_same_is_made_once() -> None:
    texts: list[str] = []

    def make(text: str) -> Constraint:
        texts.append(text)
        return Constraint(text)

    kept = GrammarCache(4 * LEAST_BYTES)
    for asked in ("a", "b", "a"):
        wanted = OutputConstraint(syntax="regex", value=asked, param="regex")
        grammar = kept.get((wanted, ParseOptions(tools=({"name": asked},)), None), partial(make, asked))
        assert grammar.grammar == asked
    assert texts == ["a", "b"]


def test_the_oldest_is_dropped_first() -> None:
    kept = GrammarCache(2 * LEAST_BYTES + 10)
    constraints = [kept.get(number, lambda: Constraint("x" * 4)) for number in (1, 2, 1, 3)]
    assert kept.bytes == 2 * LEAST_BYTES + 8
    assert kept.get(1, lambda: Constraint("new")) is constraints[0]
    assert kept.get(2, lambda: Constraint("new")).grammar == "new"
