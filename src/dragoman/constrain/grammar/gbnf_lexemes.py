"""Parts of a recursive grammar that may be lexemes after all, because no text can be read in another way.

A grammar that is read character by character is exact but slow, most of all in strings. A run such as
`"\\"" [^"]* "\\""` is the same as a lexeme if no text of it goes on to be another text of it, and if nothing
else in the grammar begins as it does: then taking the longest is taking the only one.
"""

from collections.abc import Callable, Iterator, Mapping

from dragoman.constrain.grammar.gbnf import Characters, Either, Name, Node, Repeat, Sequence, Text, Token

Ranges = list[tuple[int, int]]
_LAST = 0x10FFFF
_MOST_TRIED = 16


class Lexemes:
    """The runs that are lexemes, of one grammar.

    `regular` are the rules that lead back to none; `ends_itself` says whether no text of a node goes on to be
    another one.
    """

    def __init__(
        self, rules: Mapping[str, Node], regular: frozenset[str], ends_itself: Callable[[Node], bool]
    ) -> None:
        self.rules = rules
        self.regular = regular
        self.ends_itself = ends_itself
        self._nullable: dict[str, bool] = {}
        self._first: dict[str, Ranges] = {}

    def find(self) -> list[Sequence]:
        found: list[Sequence] = []
        tried: set[Sequence] = set()
        for sequence in self._sequences():
            for run in self._runs(sequence):
                if run in found:
                    break
                if run in tried or len(tried) >= _MOST_TRIED:
                    continue
                tried.add(run)
                if self.ends_itself(run):
                    found.append(run)
                    break
        # One that is dropped is read by characters, which others may then not stand out from.
        kept = [run for run in found if self._stands_out(run, found)]
        while kept != found:
            found, kept = kept, [run for run in kept if self._stands_out(run, kept)]
        return kept

    def _sequences(self) -> Iterator[Sequence]:
        for name, rule in self.rules.items():
            if name not in self.regular:
                yield from (node for node in inside(rule) if isinstance(node, Sequence))
        for name in self.regular:
            rule = self.rules[name]
            if isinstance(rule, Sequence):
                yield rule

    def _runs(self, sequence: Sequence) -> Iterator[Sequence]:
        """What the sequence begins with, the longest first, as far as it is regular and worth the trouble."""
        for end in range(len(sequence.parts), 1, -1):
            run = Sequence(sequence.parts[:end])
            if self._is_regular(run) and self._repeats(run) and not self.nullable(run):
                yield run

    def _is_regular(self, node: Node) -> bool:
        return all(
            not isinstance(one, Token) and (not isinstance(one, Name) or one.name in self.regular)
            for one in inside(node)
        )

    def _repeats(self, node: Node) -> bool:
        return any(isinstance(one, Repeat) and one.most is None for one in inside(node))

    def _stands_out(self, run: Sequence, found: list[Sequence]) -> bool:
        """Nothing else, at any place of the grammar, begins as the run does."""
        mine = self.first(run)
        others = [self.first(other) for other in found if other != run]
        others += [_ranges(leaf) for rule in self.rules.values() for leaf in _leaves(rule, found)]
        return not any(_overlap(mine, other) for other in others)

    def nullable(self, node: Node) -> bool:
        match node:
            case Text(text=text):
                return not text
            case Name(name=name):
                if name not in self._nullable:
                    self._nullable[name] = self.nullable(self.rules[name])
                return self._nullable[name]
            case Sequence(parts=parts):
                return all(self.nullable(part) for part in parts)
            case Either(options=options):
                return any(self.nullable(option) for option in options)
            case Repeat(part=part, least=least):
                return least == 0 or self.nullable(part)
        return False

    def first(self, node: Node) -> Ranges:
        """The characters that a text of a regular node may begin with."""
        match node:
            case Name(name=name):
                if name not in self._first:
                    self._first[name] = list(dict.fromkeys(self.first(self.rules[name])))
                return self._first[name]
            case Either(options=options):
                return [one for option in options for one in self.first(option)]
            case Repeat(part=part):
                return self.first(part)
            case Sequence(parts=parts):
                found: Ranges = []
                for part in parts:
                    found += self.first(part)
                    if not self.nullable(part):
                        break
                return found
        return _ranges(node)


def inside(node: Node) -> list[Node]:
    found = [node]
    for one in found:
        match one:
            case Sequence(parts=parts) | Either(options=parts):
                found += parts
            case Repeat(part=part):
                found.append(part)
    return found


def _leaves(node: Node, lexemes: list[Sequence]) -> Iterator[Node]:
    """The characters of a node that are in no lexeme, each by itself."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        match one:
            case Sequence(parts=parts):
                run = next((run for run in lexemes if parts[: len(run.parts)] == run.parts), None)
                waiting += parts[len(run.parts) :] if run else parts
            case Either(options=options):
                waiting += options
            case Repeat(part=part):
                waiting.append(part)
            case Text(text=text):
                yield from map(Text, text)
            case Characters():
                yield one


def _ranges(node: Node) -> Ranges:
    if isinstance(node, Text):
        return [(ord(node.text[0]), ord(node.text[0]))] if node.text else []
    if not isinstance(node, Characters):
        return []
    said = sorted((ord(first), ord(last)) for first, last in node.ranges)
    if not node.negated:
        return said
    found, next_free = [], 0
    for first, last in said:
        if first > next_free:
            found.append((next_free, first - 1))
        next_free = max(next_free, last + 1)
    return [*found, (next_free, _LAST)] if next_free <= _LAST else found


def _overlap(one: Ranges, other: Ranges) -> bool:
    return any(a <= d and c <= b for a, b in one for c, d in other)
