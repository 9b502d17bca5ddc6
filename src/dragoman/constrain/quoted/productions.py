"""A grammar in Lark as productions of at most two parts, each between two states of a quotation."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from dragoman.constrain.grammar.rules import Symbol
from dragoman.constrain.grammar.trees import (
    EMPTY,
    Alternation,
    Concatenation,
    LarkGrammar,
    Lexeme,
    Reference,
    Repetition,
    Terminals,
    Tree,
)

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


MOST_KEYS = 10_000


class Key(NamedTuple):
    """What a node stands for between two states.

    `dot` is where in a sequence it begins; -1 is a lexeme without what may be ignored before it.
    """

    node: Tree
    dot: int
    before: int
    after: int


Production: TypeAlias = tuple[Any, ...]
"""Keys, and what was made of lexemes."""
Leaf: TypeAlias = Callable[[Lexeme, int, int], Any]
START = Reference("start", 1)


class Productions:
    """All that leads from the start to a text.

    `leaf` says what a lexeme that is not empty is between two states, or None; `nullable` which lexemes may
    be empty. No lexeme leads to the state before all of them, so what leads there is the empty text.
    """

    def __init__(
        self,
        source: LarkGrammar,
        leaf: Leaf,
        nullable: Callable[[Tree], bool],
        states: Sequence[int],
        last: int,
    ) -> None:
        self.source = source
        self.leaf = leaf
        self.nullable = nullable
        self.states = states
        self.start = Key(START, 0, FRESH, last)
        self.empty = Key(START, 0, FRESH, FRESH)
        self._unrolled: dict[Tree, Tree] = {}
        self._skipped = Repetition(Lexeme(source.ignored), 0, None) if source.ignored else None
        self.found: dict[Key, list[Production]] = {}
        waiting = [self.start, self.empty]
        while waiting:
            key = waiting.pop()
            if key in self.found:
                continue
            if len(self.found) > MOST_KEYS:
                raise Unquotable("is too large")
            self.found[key] = list(self._expanded(key))
            waiting += [part for made in self.found[key] for part in made if isinstance(part, Key)]
        self._prune()

    def _expanded(self, key: Key) -> Iterable[Production]:
        node, dot, before, after = key
        match node:
            case Reference():
                return [(Key(self.source.rules[node.name], 0, before, after),)]
            case Alternation():
                return [(Key(option, 0, before, after),) for option in node.options]
            case Concatenation():
                return self._from_dot(node, key)
            case Repetition():
                if (node.least, node.most) != (0, None):
                    if node not in self._unrolled:
                        self._unrolled[node] = unroll(node)
                    return [(Key(self._unrolled[node], 0, before, after),)]
                return self._starred(node, before, after)
            case Lexeme():
                return self._lexeme(node, dot, before, after)
        return []

    def _from_dot(self, node: Concatenation, key: Key) -> list[Production]:
        left = len(node.parts) - key.dot
        if not left:
            return [()] if key.before == key.after else []
        part = node.parts[key.dot]
        if left == 1:
            return [(Key(part, 0, key.before, key.after),)]
        return [
            (Key(part, 0, key.before, middle), Key(node, key.dot + 1, middle, key.after))
            for middle in self._between(key.before)
        ]

    def _starred(self, node: Repetition, before: int, after: int) -> list[Production]:
        nothing: list[Production] = [()] if before == after else []
        return nothing + [
            (Key(node, 0, before, middle), Key(node.inner, 0, middle, after))
            for middle in self._between(before)
        ]

    def _lexeme(self, node: Lexeme, dot: int, before: int, after: int) -> list[Production]:
        nothing: list[Production] = [()] if dot >= 0 and before == after and self.nullable(node) else []
        if dot < 0 or before == FRESH or self._skipped is None or node is self._skipped.inner:
            made = self.leaf(node, before, after) if after != FRESH else None
            return nothing if made is None else [*nothing, (made,)]
        return nothing + [
            (Key(self._skipped, 0, before, middle), Key(node, -1, middle, after))
            for middle in self._between(before)
        ]

    def _between(self, before: int) -> list[int]:
        return [*([FRESH] if before == FRESH else []), *self.states]

    def _prune(self) -> None:
        """Only what leads to a text is kept: anything else would be a dead end."""
        users: dict[Key, list[tuple[Key, int]]] = {}
        missing: dict[tuple[Key, int], int] = {}
        good: set[Key] = set()
        ready: deque[Key] = deque()
        for key, made in self.found.items():
            for number, production in enumerate(made):
                parts = [part for part in production if isinstance(part, Key)]
                missing[key, number] = len(parts)
                for part in parts:
                    users.setdefault(part, []).append((key, number))
                if not parts:
                    ready.append(key)
        while ready:
            key = ready.popleft()
            if key in good:
                continue
            good.add(key)
            for user in users.get(key, ()):
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user[0])
        self.found = {
            key: [one for one in made if all(part in good for part in one if isinstance(part, Key))]
            for key, made in self.found.items()
            if key in good
        }


def unroll(node: Repetition) -> Tree:
    """`x{3,}` as `x x x x*`, in a size that grows with the digits of the counts."""
    counts = _Counts(node.inner)
    rest = Repetition(node.inner, 0, None) if node.most is None else counts.up_to(node.most - node.least)
    return Concatenation((counts.exactly(node.least), rest))


class _Counts:
    """One node for each number of times, which larger numbers are made of."""

    def __init__(self, inner: Tree) -> None:
        self._exactly: dict[int, Tree] = {0: EMPTY, 1: inner}
        self._up_to: dict[int, Tree] = {0: EMPTY}

    def exactly(self, count: int) -> Tree:
        if count not in self._exactly:
            half = self.exactly(count // 2)
            self._exactly[count] = Concatenation((half, half, self.exactly(count % 2)))
        return self._exactly[count]

    def up_to(self, most: int) -> Tree:
        """Fewer than half of them, or at least half: so that there is one way to each number."""
        if most not in self._up_to:
            half = (most + 1) // 2
            more = Concatenation((self.exactly(half), self.up_to(most - half)))
            self._up_to[most] = Alternation((self.up_to(half - 1), more))
        return self._up_to[most]


NONE: frozenset[int] = frozenset()


def find_following(made: Productions, terminals: Terminals) -> dict[Lexeme, frozenset[int]]:
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
