"""How the text of a tool may stand inside of a call, lexeme by lexeme."""

from typing import Protocol

from dragoman.constrain.grammar.rules import Symbol
from dragoman.constrain.grammar.trees import Lexeme

FRESH, INSIDE, AHEAD = 0, 1, 2
"""Before the first lexeme; after one; and after one together with something that is not of it."""


class Unquotable(ValueError):
    """Why the texts of a grammar cannot be written inside of a call."""


class Quotation(Protocol):
    last: int
    """The state in which a text may end."""

    def lexeme(self, node: Lexeme, before: int, after: int) -> Symbol | None:
        """What is written for a lexeme between two states; None where there is nothing."""
        ...
