"""Which bytes may follow each lexeme of a grammar."""

from dragoman.constrain.grammar.terminals import Terminals
from dragoman.constrain.grammar.trees import Lexeme
from dragoman.constrain.quoted.productions import Key, Productions

NONE: frozenset[int] = frozenset()


def following(made: Productions, terminals: Terminals) -> dict[Lexeme, frozenset[int]]:
    """By lexeme, of productions that have lexemes for leaves."""
    empty = _nullable(made)
    first = _first(made, terminals, empty)
    after: dict[object, frozenset[int]] = {}
    changed = True
    while changed:
        changed = False
        for key, productions in made.found.items():
            for production in productions:
                follow = after.get(key, NONE)
                for part in reversed(production):
                    known = after.get(part, NONE)
                    if not follow <= known:
                        after[part], changed = known | follow, True
                    begins = first.get(part, NONE) if isinstance(part, Key) else terminals.first(part)
                    follow = begins | follow if part in empty else begins
    return {part: bytes_ for part, bytes_ in after.items() if isinstance(part, Lexeme)}


def _nullable(made: Productions) -> set[object]:
    empty: set[object] = set()
    changed = True
    while changed:
        found = {
            key
            for key, made_of in made.found.items()
            if any(all(part in empty for part in one) for one in made_of)
        }
        changed = not found <= empty
        empty |= found
    return empty


def _first(made: Productions, terminals: Terminals, empty: set[object]) -> dict[object, frozenset[int]]:
    first: dict[object, frozenset[int]] = {}
    changed = True
    while changed:
        changed = False
        for key, productions in made.found.items():
            found = first.get(key, NONE)
            for production in productions:
                for part in production:
                    found |= first.get(part, NONE) if isinstance(part, Key) else terminals.first(part)
                    if part not in empty:
                        break
            if not found <= first.get(key, NONE):
                first[key], changed = found, True
    return first
