"""A grammar in Lark as productions of at most two parts, each between two states of a quotation."""

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequenced
from typing import Any, NamedTuple, TypeAlias

from dragoman.constrain.grammar.trees import EMPTY, Choice, Lexeme, Name, Node, Repeat, Sequence, Source
from dragoman.constrain.quoted.quotations import FRESH, Unquotable

MOST_KEYS = 10_000


class Key(NamedTuple):
    """What a node stands for between two states.

    `dot` is where in a sequence it begins; -1 is a lexeme without what may be ignored before it.
    """

    node: Node
    dot: int
    before: int
    after: int


Production: TypeAlias = tuple[Any, ...]
"""Keys, and what was made of lexemes."""
Leaf: TypeAlias = Callable[[Lexeme, int, int], Any]
START = Name("start", 1)


class Productions:
    """All that leads from the start to a text.

    `leaf` says what a lexeme that is not empty is between two states, or None; `nullable` which lexemes may
    be empty. No lexeme leads to the state before all of them, so what leads there is the empty text.
    """

    def __init__(
        self, source: Source, leaf: Leaf, nullable: Callable[[Node], bool], states: Sequenced[int], last: int
    ) -> None:
        self.source = source
        self.leaf = leaf
        self.nullable = nullable
        self.states = states
        self.start = Key(START, 0, FRESH, last)
        self.empty = Key(START, 0, FRESH, FRESH)
        self._unrolled: dict[Node, Node] = {}
        self._skipped = Repeat(Lexeme(source.ignored), 0, None) if source.ignored else None
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
            case Name():
                return [(Key(self.source.rules[node.name], 0, before, after),)]
            case Choice():
                return [(Key(option, 0, before, after),) for option in node.options]
            case Sequence():
                return self._from_dot(node, key)
            case Repeat():
                if (node.least, node.most) != (0, None):
                    if node not in self._unrolled:
                        self._unrolled[node] = unrolled(node)
                    return [(Key(self._unrolled[node], 0, before, after),)]
                return self._starred(node, before, after)
            case Lexeme():
                return self._lexeme(node, dot, before, after)
        return []

    def _from_dot(self, node: Sequence, key: Key) -> list[Production]:
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

    def _starred(self, node: Repeat, before: int, after: int) -> list[Production]:
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


def unrolled(node: Repeat) -> Node:
    """`x{3,}` as `x x x x*`, in a size that grows with the digits of the counts."""
    counts = _Counts(node.inner)
    rest = Repeat(node.inner, 0, None) if node.most is None else counts.up_to(node.most - node.least)
    return Sequence((counts.exactly(node.least), rest))


class _Counts:
    """One node for each number of times, which larger numbers are made of."""

    def __init__(self, inner: Node) -> None:
        self._exactly: dict[int, Node] = {0: EMPTY, 1: inner}
        self._up_to: dict[int, Node] = {0: EMPTY}

    def exactly(self, count: int) -> Node:
        if count not in self._exactly:
            half = self.exactly(count // 2)
            self._exactly[count] = Sequence((half, half, self.exactly(count % 2)))
        return self._exactly[count]

    def up_to(self, most: int) -> Node:
        """Fewer than half of them, or at least half: so that there is one way to each number."""
        if most not in self._up_to:
            half = (most + 1) // 2
            more = Sequence((self.exactly(half), self.up_to(most - half)))
            self._up_to[most] = Choice((self.up_to(half - 1), more))
        return self._up_to[most]
