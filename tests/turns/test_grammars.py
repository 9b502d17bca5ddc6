from functools import partial

from dragoman.constrain.constraint import Constraint
from dragoman.turns.constrain import LEAST_BYTES, Grammars
from dragoman.turns.spec import Reading, Wanted


def test_the_same_is_made_once() -> None:
    made: list[str] = []

    def make(text: str) -> Constraint:
        made.append(text)
        return Constraint(text)

    kept = Grammars(4 * LEAST_BYTES)
    for asked in ("a", "b", "a"):
        wanted = Wanted(syntax="regex", value=asked, param="regex")
        grammar = kept.get((wanted, Reading(tools=({"name": asked},)), None), partial(make, asked))
        assert grammar.grammar == asked
    assert made == ["a", "b"]


def test_the_oldest_is_dropped_first() -> None:
    kept = Grammars(2 * LEAST_BYTES + 10)
    made = [kept.get(number, lambda: Constraint("x" * 4)) for number in (1, 2, 1, 3)]
    assert kept.bytes == 2 * LEAST_BYTES + 8
    assert kept.get(1, lambda: Constraint("new")) is made[0]
    assert kept.get(2, lambda: Constraint("new")).grammar == "new"
