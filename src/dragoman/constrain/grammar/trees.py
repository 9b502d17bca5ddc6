"""Grammars and expressions as trees, and properties of their languages.

GBNF, Lark, and the expressions of both JSON Schema and Lark are parsed into the same trees. Nodes are
compared by identity, not content: two that look alike are two locations in the grammar.
"""

from collections.abc import Callable, Hashable, Iterable, KeysView, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

from msgspec import Struct

from dragoman.constrain.grammar.lark_builder import LarkBuilder, Symbol, ask_first, literal, regex

_Known = TypeVar("_Known", bound=Hashable)


class LiteralText(Struct, frozen=True, eq=False):
    """Characters that stand for themselves."""

    text: str


class CharClass(Struct, frozen=True, eq=False):
    """One character of several; `inner` is the contents of brackets, or brackets with these."""

    inner: str
    any_case: bool = False

    @property
    def pattern(self) -> str:
        return f"(?i:[{self.inner}])" if self.any_case else f"[{self.inner}]"


class Reference(Struct, frozen=True, eq=False):
    """A reference to a rule or a terminal."""

    name: str
    line: int


class Concatenation(Struct, frozen=True, eq=False):
    parts: "tuple[Tree, ...]"


class Alternation(Struct, frozen=True, eq=False):
    """A choice; without options, a language without texts."""

    options: "tuple[Tree, ...]"


class Repetition(Struct, frozen=True, eq=False):
    inner: "Tree"
    least: int
    most: int | None
    """Maximum number of times; None for no limit."""


class Intersection(Struct, frozen=True, eq=False):
    """Texts that are in all of these languages."""

    parts: "tuple[Tree, ...]"


class Complement(Struct, frozen=True, eq=False):
    inner: "Tree"


class Lexeme(Struct, frozen=True, eq=False):
    """In a rule: a terminal that is read as one lexeme."""

    inner: "Tree"


Tree: TypeAlias = (
    LiteralText
    | CharClass
    | Reference
    | Concatenation
    | Alternation
    | Repetition
    | Intersection
    | Complement
    | Lexeme
)

EMPTY = Concatenation(())
NEVER = Alternation(())


class LarkGrammar(Struct, frozen=True):
    """A parsed Lark grammar."""

    rules: Mapping[str, Tree]
    terminals: Mapping[str, Tree]
    ignored: Tree | None = None
    """Text that is allowed between lexemes and ignored."""


def concatenate(parts: Iterable[Tree]) -> Tree:
    """Concatenate trees; adjacent literal texts become one."""
    items: list[Tree] = []
    for part in parts:
        if part is NEVER:
            return NEVER
        for node in part.parts if isinstance(part, Concatenation) else (part,):
            if isinstance(node, LiteralText) and items and isinstance(items[-1], LiteralText):
                items[-1] = LiteralText(items[-1].text + node.text)
            else:
                items.append(node)
    if not items:
        return EMPTY
    return items[0] if len(items) == 1 else Concatenation(tuple(items))


def alternate(options: Iterable[Tree]) -> Tree:
    items = tuple(option for option in options if option is not NEVER)
    if not items:
        return NEVER
    return items[0] if len(items) == 1 else Alternation(items)


def repeat(inner: Tree, least: int, most: int | None) -> Tree:
    if inner is NEVER or most == 0:
        return NEVER if least else EMPTY
    return Repetition(inner, least, most)


ALL = frozenset(range(256))


def rebuild(tree: Tree, change: Callable[[Tree], Tree]) -> Tree:
    """Return the tree with all its children changed."""
    match tree:
        case Concatenation():
            return concatenate(map(change, tree.parts))
        case Alternation():
            return alternate(map(change, tree.options))
        case Repetition():
            return repeat(change(tree.inner), tree.least, tree.most)
        case Intersection():
            parts = tuple(map(change, tree.parts))
            return NEVER if NEVER in parts else Intersection(parts)
        case Lexeme():
            return change(tree.inner)
    return tree


def walk_tree(tree: Tree) -> list[Tree]:
    """Return the tree itself and all trees within it."""
    items = [tree]
    for node in items:
        match node:
            case Concatenation() | Intersection():
                items += node.parts
            case Alternation():
                items += node.options
            case Repetition() | Complement() | Lexeme():
                items.append(node.inner)
    return items


def grow(all_: Sequence[_Known], holds: Callable[[_Known, KeysView[_Known]], bool]) -> dict[_Known, None]:
    """Return the elements for which a predicate holds that depends on the elements already found; each comes
    after those it depends on.
    """
    mapping: dict[_Known, None] = {}
    before = -1
    while before < len(mapping):
        before = len(mapping)
        for item in reversed(all_):
            if item not in mapping and holds(item, mapping.keys()):
                mapping[item] = None
    return mapping


@lru_cache(maxsize=4096)
def first_bytes(pattern: str) -> frozenset[int]:
    """Return the bytes that a text of this expression may begin with."""
    bits = ask_first(f"start: T\nT: /{pattern}/")
    return frozenset(byte for byte in range(256) if bits[byte // 8 :] and bits[byte // 8] >> byte % 8 & 1)


class Terminals:
    """Terminals by name, written into `rules` when they are used. None of them refers to itself."""

    def __init__(self, rules: LarkBuilder, known: Mapping[str, Tree]) -> None:
        self.rules = rules
        self.known = known
        self._nullable: dict[str, bool] = {}
        self._first: dict[str, frozenset[int]] = {}
        self._written: dict[str, Symbol] = {}
        self._possible: dict[str, bool] = {}

    def nullable(self, node: Tree) -> bool:
        """Whether the empty text is in the language."""
        match node:
            case LiteralText():
                return not node.text
            case CharClass():
                return False
            case Reference():
                if node.name not in self._nullable:
                    self._nullable[node.name] = self.nullable(self.known[node.name])
                return self._nullable[node.name]
            case Concatenation() | Intersection():
                return all(map(self.nullable, node.parts))
            case Alternation():
                return any(map(self.nullable, node.options))
            case Repetition():
                return node.least == 0 or self.nullable(node.inner)
            case Complement():
                return not self.nullable(node.inner)
            case Lexeme():
                return self.nullable(node.inner)

    def first(self, node: Tree) -> frozenset[int]:
        """Return the bytes that a text may begin with; the set may be too large."""
        match node:
            case LiteralText():
                return frozenset(node.text.encode()[:1])
            case CharClass():
                return first_bytes(node.pattern)
            case Reference():
                if node.name not in self._first:
                    self._first[node.name] = self.first(self.known[node.name])
                return self._first[node.name]
            case Concatenation():
                numbers: frozenset[int] = frozenset()
                for part in node.parts:
                    numbers |= self.first(part)
                    if not self.nullable(part):
                        break
                return numbers
            case Alternation():
                return frozenset().union(*map(self.first, node.options))
            case Intersection():
                return ALL.intersection(*map(self.first, node.parts))
            case Repetition() | Lexeme():
                return self.first(node.inner)
            case Complement():
                return ALL

    def write(self, node: Tree) -> Symbol:
        """Return the body of a terminal."""
        match node:
            case LiteralText():
                return literal(node.text)
            case CharClass():
                return regex(node.pattern)
            case Reference():
                if node.name not in self._written:
                    self._written[node.name] = self.rules.terminal(self.write(self.known[node.name]))
                return self._written[node.name]
            case Concatenation():
                return Symbol(f"({' '.join(map(self.write, node.parts))})" if node.parts else '""')
            case Alternation():
                return Symbol(f"({' | '.join(map(self.write, node.options))})")
            case Intersection():
                return Symbol(f"({' & '.join(map(self.write, node.parts))})")
            case Repetition():
                most = "" if node.most is None else node.most
                return Symbol(f"({self.write(node.inner)}){{{node.least},{most}}}")
            case Complement():
                return Symbol(f"~({self.write(node.inner)})")
            case Lexeme():
                return self.write(node.inner)

    def goes_on(self, node: Tree, apart: frozenset[int]) -> bool:
        """Whether every text can be extended by a character that does not begin with one of these bytes."""
        match node:
            case Repetition():
                return node.most is None and bool(self.first(node.inner) - apart)
            case Concatenation():
                return bool(node.parts) and self.goes_on(node.parts[-1], apart)
            case Alternation():
                return all(self.goes_on(option, apart) for option in node.options)
            case Reference():
                return self.goes_on(self.known[node.name], apart)
            case Lexeme():
                return self.goes_on(node.inner, apart)
        return False

    def is_possible(self, body: str) -> bool:
        """Whether the language of this terminal body contains any text."""
        if body not in self._possible:
            self._possible[body] = any(ask_first(f"{self.rules.grammar('ASKED')}\nASKED: {body}"))
        return self._possible[body]
