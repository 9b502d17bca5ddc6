"""What can be asked of the terminals of a grammar in Lark, and how they are written again."""

from collections.abc import Mapping
from functools import lru_cache

from dragoman.constrain.budget import compiled
from dragoman.constrain.bytewise import byte_vocabulary
from dragoman.constrain.grammar.rules import Rules, Symbol, literal, regex
from dragoman.constrain.grammar.trees import (
    Both,
    Choice,
    Class,
    Lexeme,
    Name,
    Node,
    Not,
    Repeat,
    Sequence,
    Text,
)

ALL = frozenset(range(256))


@lru_cache(maxsize=4096)
def first_bytes(pattern: str) -> frozenset[int]:
    """The bytes that a text of this expression may begin with."""
    native = compiled(byte_vocabulary(), f"start: T\nT: /{pattern}/")
    bits = b"" if native.is_error() else native.compute_bitmask()
    return frozenset(byte for byte in range(256) if bits[byte // 8 :] and bits[byte // 8] >> byte % 8 & 1)


class Terminals:
    """Terminals by name, written into `rules` where they are used. None of them refers to itself."""

    def __init__(self, rules: Rules, known: Mapping[str, Node]) -> None:
        self.rules = rules
        self.known = known
        self._nullable: dict[str, bool] = {}
        self._first: dict[str, frozenset[int]] = {}
        self._written: dict[str, Symbol] = {}
        self._possible: dict[str, bool] = {}

    def nullable(self, node: Node) -> bool:
        """Whether the empty text is in the language."""
        match node:
            case Text():
                return not node.text
            case Class():
                return False
            case Name():
                if node.name not in self._nullable:
                    self._nullable[node.name] = self.nullable(self.known[node.name])
                return self._nullable[node.name]
            case Sequence() | Both():
                return all(map(self.nullable, node.parts))
            case Choice():
                return any(map(self.nullable, node.options))
            case Repeat():
                return node.least == 0 or self.nullable(node.inner)
            case Not():
                return not self.nullable(node.inner)
            case Lexeme():
                return self.nullable(node.inner)

    def first(self, node: Node) -> frozenset[int]:
        """The bytes that a text may begin with, and perhaps some more."""
        match node:
            case Text():
                return frozenset(node.text.encode()[:1])
            case Class():
                return first_bytes(node.pattern)
            case Name():
                if node.name not in self._first:
                    self._first[node.name] = self.first(self.known[node.name])
                return self._first[node.name]
            case Sequence():
                found: frozenset[int] = frozenset()
                for part in node.parts:
                    found |= self.first(part)
                    if not self.nullable(part):
                        break
                return found
            case Choice():
                return frozenset().union(*map(self.first, node.options))
            case Both():
                return ALL.intersection(*map(self.first, node.parts))
            case Repeat() | Lexeme():
                return self.first(node.inner)
            case Not():
                return ALL

    def written(self, node: Node) -> Symbol:
        """The body of a terminal."""
        match node:
            case Text():
                return literal(node.text)
            case Class():
                return regex(node.pattern)
            case Name():
                if node.name not in self._written:
                    self._written[node.name] = self.rules.terminal(self.written(self.known[node.name]))
                return self._written[node.name]
            case Sequence():
                return Symbol(f"({' '.join(map(self.written, node.parts))})" if node.parts else '""')
            case Choice():
                return Symbol(f"({' | '.join(map(self.written, node.options))})")
            case Both():
                return Symbol(f"({' & '.join(map(self.written, node.parts))})")
            case Repeat():
                most = "" if node.most is None else node.most
                return Symbol(f"({self.written(node.inner)}){{{node.least},{most}}}")
            case Not():
                return Symbol(f"~({self.written(node.inner)})")
            case Lexeme():
                return self.written(node.inner)

    def goes_on(self, node: Node, apart: frozenset[int]) -> bool:
        """Whether every text can become longer by a character that does not begin with one of these bytes."""
        match node:
            case Repeat():
                return node.most is None and bool(self.first(node.inner) - apart)
            case Sequence():
                return bool(node.parts) and self.goes_on(node.parts[-1], apart)
            case Choice():
                return all(self.goes_on(option, apart) for option in node.options)
            case Name():
                return self.goes_on(self.known[node.name], apart)
            case Lexeme():
                return self.goes_on(node.inner, apart)
        return False

    def possible(self, body: str) -> bool:
        """Whether there is a text in the language of this body of a terminal."""
        if body not in self._possible:
            self._possible[body] = self._compiles(body)
        return self._possible[body]

    def _compiles(self, body: str) -> bool:
        native = compiled(byte_vocabulary(), f"{self.rules.grammar('ASKED')}\nASKED: {body}")
        return not native.is_error() and any(native.compute_bitmask()) and not native.is_error()
