r"""The grammar of a text, made into the grammar of that text inside of a call.

A custom tool takes a text, and its grammar speaks of that text. But the model writes it inside of a call:
in the quotes of JSON, where a newline is `\n`, or between tags, where the text ends with a tag. What is
needed is a second grammar, that of the text as it is written there.

**Why not lexeme by lexeme.** A grammar in Lark is rules over lexemes, so one could put each lexeme in
quotes and leave the rules alone. It fails because of how llguidance reads: it takes the longest lexeme
that fits and never goes back. Take the grammar

    start: WORD "\n"
    WORD: /[a-z\t]+/

In the plain text `ab⏎`, the newline shows that WORD has ended. In quotes this is `ab\n`, and the
backslash shows nothing: it may begin the `\t` of a longer WORD or the `\n` that comes next. Only the
character after it tells, and then the backslash has been read. If WORD took it, the next lexeme has to do
without.

**States.** So each lexeme comes in several forms, by what was read before it and what is read with it:

    FRESH    nothing has been read yet
    INSIDE   a lexeme has ended, and nothing of the next was read
    AHEAD    a lexeme has ended, and what comes next was begun: in quotes, a backslash was read; between tags,
             the whole closing tag was, for a text may go on to look like it, too

For WORD between INSIDE and INSIDE that is `/([a-z]|\\t)+/`, between INSIDE and AHEAD the same with one
more backslash; for the newline between INSIDE and INSIDE it is `\\n`, and between AHEAD and INSIDE only
`n`. What is longest is then decided by whole characters, as in the plain text. A `QuotingScheme` (see
schemes.py) says what a lexeme is between two states, or that there is none.

**Rules between states.** What holds for lexemes goes on to rules. `x: y z` from a state to another is `y`
from the first to some state in the middle, and `z` from there to the last, for every state that may be
the middle:

    x[FRESH, INSIDE]:  y[FRESH, INSIDE] z[INSIDE, INSIDE]
                     | y[FRESH, AHEAD]  z[AHEAD, INSIDE]

In the theory of languages this is how a grammar is intersected with a finite automaton (Bar-Hillel). Here
a symbol like `y[FRESH, AHEAD]` is a `ProductionKey`, and what it may be replaced by are its productions.
There are never more than two parts in one, since each further part would multiply them by the number of
states: a longer sequence is its first part and then a key for the rest, which begins at a `dot`.
`Productions` finds all keys that the start leads to, and drops those that lead to no text. `quoted_lark.py`
writes what is left as rules.

Three things are done on the way. What `%ignore` names is put before each lexeme but the first. A lexeme
that may be empty is left out or is not empty, since llguidance reads no empty ones. And `x{3,9}` is
unrolled, because a count cannot know in which state each of its rounds ends.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from dragoman.constrain.grammar.lark_builder import Symbol
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
    grow,
)

FRESH, INSIDE, AHEAD = 0, 1, 2
"""States: before the first lexeme; after one; and after one together with a part of what follows."""


class UnquotableGrammar(ValueError):
    """The texts of a grammar cannot be written inside a call; the message is the reason."""


class QuotingScheme(Protocol):
    last: int
    """State in which a text may end."""

    def lexeme(self, node: Lexeme, before: int, after: int) -> Symbol | None:
        """Return how a lexeme is written between two states; None if it cannot be."""
        ...


MOST_KEYS = 10_000
NONE: frozenset[int] = frozenset()


class ProductionKey(NamedTuple):
    """A node between two states.

    `dot` is the offset in a sequence at which it begins; -1 is a lexeme without ignored text before it.
    """

    node: Tree
    dot: int
    before: int
    after: int


Production: TypeAlias = tuple[Any, ...]
"""Keys and written lexemes."""
Leaf: TypeAlias = Callable[[Lexeme, int, int], Any]
START = Reference("start", 1)


class Productions:
    """All productions that lead from the start to a text.

    `leaf` returns how a non-empty lexeme is written between two states, or None; `nullable` tells which
    lexemes may be empty. No lexeme leads to the state before all lexemes, so whatever leads there is the
    empty text.
    """

    def __init__(
        self,
        grammar: LarkGrammar,
        leaf: Leaf,
        nullable: Callable[[Tree], bool],
        states: Sequence[int],
        last: int,
    ) -> None:
        self.grammar = grammar
        self.leaf = leaf
        self.nullable = nullable
        self.states = states
        self.start = ProductionKey(START, 0, FRESH, last)
        self.empty = ProductionKey(START, 0, FRESH, FRESH)
        self._unrolled: dict[Tree, Tree] = {}
        self._skipped = Repetition(Lexeme(grammar.ignored), 0, None) if grammar.ignored else None
        self.productions: dict[ProductionKey, list[Production]] = {}
        waiting = [self.start, self.empty]
        while waiting:
            key = waiting.pop()
            if key in self.productions:
                continue
            if len(self.productions) > MOST_KEYS:
                raise UnquotableGrammar("is too large")
            self.productions[key] = list(self._expand(key))
            waiting += [
                part
                for production in self.productions[key]
                for part in production
                if isinstance(part, ProductionKey)
            ]
        self._prune()

    def _expand(self, key: ProductionKey) -> Iterable[Production]:
        node, dot, before, after = key
        match node:
            case Reference():
                return [(ProductionKey(self.grammar.rules[node.name], 0, before, after),)]
            case Alternation():
                return [(ProductionKey(option, 0, before, after),) for option in node.options]
            case Concatenation():
                return self._expand_sequence(node, key)
            case Repetition():
                if (node.least, node.most) != (0, None):
                    if node not in self._unrolled:
                        self._unrolled[node] = unroll(node)
                    return [(ProductionKey(self._unrolled[node], 0, before, after),)]
                return self._expand_star(node, before, after)
            case Lexeme():
                return self._expand_lexeme(node, dot, before, after)
        return []

    def _expand_sequence(self, node: Concatenation, key: ProductionKey) -> list[Production]:
        left = len(node.parts) - key.dot
        if not left:
            return [()] if key.before == key.after else []
        part = node.parts[key.dot]
        if left == 1:
            return [(ProductionKey(part, 0, key.before, key.after),)]
        return [
            (ProductionKey(part, 0, key.before, middle), ProductionKey(node, key.dot + 1, middle, key.after))
            for middle in self._middles(key.before)
        ]

    def _expand_star(self, node: Repetition, before: int, after: int) -> list[Production]:
        nothing: list[Production] = [()] if before == after else []
        return nothing + [
            (ProductionKey(node, 0, before, middle), ProductionKey(node.inner, 0, middle, after))
            for middle in self._middles(before)
        ]

    def _expand_lexeme(self, node: Lexeme, dot: int, before: int, after: int) -> list[Production]:
        nothing: list[Production] = [()] if dot >= 0 and before == after and self.nullable(node) else []
        if dot < 0 or before == FRESH or self._skipped is None or node is self._skipped.inner:
            result = self.leaf(node, before, after) if after != FRESH else None
            return nothing if result is None else [*nothing, (result,)]
        return nothing + [
            (ProductionKey(self._skipped, 0, before, middle), ProductionKey(node, -1, middle, after))
            for middle in self._middles(before)
        ]

    def _middles(self, before: int) -> list[int]:
        return [*([FRESH] if before == FRESH else []), *self.states]

    def _prune(self) -> None:
        """Keep only what leads to a text: anything else would be a dead end."""
        users: dict[ProductionKey, list[tuple[ProductionKey, int]]] = {}
        missing: dict[tuple[ProductionKey, int], int] = {}
        good: set[ProductionKey] = set()
        ready: deque[ProductionKey] = deque()
        for key, productions in self.productions.items():
            for number, production in enumerate(productions):
                parts = [part for part in production if isinstance(part, ProductionKey)]
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
        self.productions = {
            key: [
                each
                for each in productions
                if all(part in good for part in each if isinstance(part, ProductionKey))
            ]
            for key, productions in self.productions.items()
            if key in good
        }


def unroll(node: Repetition) -> Tree:
    """Unroll `x{3,}` to `x x x x*`, in a size that grows with the digits of the counts."""
    counts = _Counts(node.inner)
    rest = Repetition(node.inner, 0, None) if node.most is None else counts.up_to(node.most - node.least)
    return Concatenation((counts.exactly(node.least), rest))


class _Counts:
    """One node for each number of times; larger numbers are built from smaller ones."""

    def __init__(self, inner: Tree) -> None:
        self._exactly: dict[int, Tree] = {0: EMPTY, 1: inner}
        self._up_to: dict[int, Tree] = {0: EMPTY}

    def exactly(self, count: int) -> Tree:
        if count not in self._exactly:
            half = self.exactly(count // 2)
            self._exactly[count] = Concatenation((half, half, self.exactly(count % 2)))
        return self._exactly[count]

    def up_to(self, most: int) -> Tree:
        """Return a node for up to `most` times: fewer than half, or at least half, so that each number has
        one parse.
        """
        if most not in self._up_to:
            half = (most + 1) // 2
            more = Concatenation((self.exactly(half), self.up_to(most - half)))
            self._up_to[most] = Alternation((self.up_to(half - 1), more))
        return self._up_to[most]


def find_following(result: Productions, terminals: Terminals) -> dict[Lexeme, frozenset[int]]:
    """Return the bytes that may follow each lexeme, from productions whose leaves are lexemes."""
    parts = {key: list(map(frozenset, productions)) for key, productions in result.productions.items()}
    empty = grow(list(parts), lambda key, known: any(one <= known for one in parts[key]))
    first = _find_first(result, terminals, empty)
    after: dict[object, frozenset[int]] = {}
    changed = True
    while changed:
        changed = False
        for key, productions in result.productions.items():
            for production in productions:
                follow = after.get(key, NONE)
                for part in reversed(production):
                    known = after.get(part, NONE)
                    if not follow <= known:
                        after[part], changed = known | follow, True
                    begins = (
                        first.get(part, NONE) if isinstance(part, ProductionKey) else terminals.first(part)
                    )
                    follow = begins | follow if part in empty else begins
    return {part: bytes_ for part, bytes_ in after.items() if isinstance(part, Lexeme)}


def _find_first(
    result: Productions, terminals: Terminals, empty: Container[ProductionKey]
) -> dict[object, frozenset[int]]:
    """Return the bytes that may come first in each key."""
    first: dict[object, frozenset[int]] = {}
    changed = True
    while changed:
        changed = False
        for key, productions in result.productions.items():
            numbers = first.get(key, NONE)
            for production in productions:
                for part in production:
                    numbers |= (
                        first.get(part, NONE) if isinstance(part, ProductionKey) else terminals.first(part)
                    )
                    if part not in empty:
                        break
            if not numbers <= first.get(key, NONE):
                first[key], changed = numbers, True
    return first
