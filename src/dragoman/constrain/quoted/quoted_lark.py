"""A text in the language of a person's grammar, as it stands inside of a call."""

from collections.abc import Callable

from dragoman.constrain.grammar.rules import Rules, Symbol, either, literal
from dragoman.constrain.grammar.trees import (
    CharClass,
    Complement,
    Intersection,
    Lexeme,
    Repetition,
    Terminals,
    Tree,
)
from dragoman.constrain.quoted.lark_reader import UnreadGrammar, read_lark
from dragoman.constrain.quoted.productions import (
    AHEAD,
    FRESH,
    INSIDE,
    Key,
    Production,
    Productions,
    Quotation,
    Unquotable,
    find_following,
)
from dragoman.constrain.quoted.quotations import Escaped, Raw
from dragoman.errors import BadRequest

NOTHING = Symbol('""')
SOMETHING = Repetition(CharClass(r"\s\S"), 1, None)


class QuotedLark:
    """The texts of one grammar, which llguidance has compiled before; messages call it `param`."""

    def __init__(self, rules: Rules, grammar: str, param: str) -> None:
        self.rules = rules
        self.param = param
        try:
            self.source = read_lark(grammar)
        except UnreadGrammar as error:
            message = f"'{param}' has what cannot be enforced inside of a call: {error}."
            raise BadRequest(message, param=param, code="invalid_grammar") from error
        self.terminals = Terminals(rules, self.source.terminals)
        self._read: dict[tuple[Lexeme, bool], Lexeme] = {}

    def write_escaped(self, quote: str) -> Symbol:
        """In quotes, as in JSON."""
        inside = self._write(lambda: Escaped(self.terminals, quote), NOTHING)
        return self.rules.rule(f"{literal(quote)} {inside} {literal(quote)}")

    def write_raw(self, end: str, mark: str) -> Symbol:
        """As it is, and then `end`. `mark` is what a text cannot have in it, unless it is a special token."""
        return self._write(lambda: self._raw(end, mark), self.rules.sequence(end))

    def _raw(self, end: str, mark: str) -> Raw:
        plain = Productions(
            self.source, lambda node, before, _: self._lexeme(node, before), self._nullable, [INSIDE], INSIDE
        )
        return Raw(self.terminals, end, mark, find_following(plain, self.terminals))

    def _write(self, quotation: Callable[[], Quotation], nothing: Symbol) -> Symbol:
        try:
            found = self._texts(quotation(), nothing)
        except Unquotable as error:
            why = str(error)
        except RecursionError:
            why = "has too many terminals within each other"
        else:
            if found is not None:
                return found
            why = "allows none that can stand there"
        message = f"No text of '{self.param}' can be written in this model's syntax for calls: it {why}."
        raise BadRequest(message, param=self.param, code="invalid_grammar")

    def _texts(self, quotation: Quotation, nothing: Symbol) -> Symbol | None:
        def leaf(node: Lexeme, before: int, after: int) -> Symbol | None:
            return quotation.lexeme(self._lexeme(node, before), before, after)

        made = Productions(self.source, leaf, self._nullable, [INSIDE, AHEAD], quotation.last)
        ways = [nothing] if made.empty in made.found else []
        if made.start in made.found:
            ways.append(_write_rules(self.rules, made))
        return self.rules.rule(either(ways)) if ways else None

    def _nullable(self, node: Tree) -> bool:
        return self.terminals.nullable(node)

    def _lexeme(self, node: Lexeme, before: int) -> Lexeme:
        """What is read in one piece: never nothing, and where something may be ignored, not that."""
        ignored = self.source.ignored if before != FRESH else None
        known = node, ignored is not None
        if known not in self._read:
            inner = node.inner
            if self._nullable(inner):
                inner = _not_empty(inner, self.terminals)
            if (
                ignored
                and inner is not ignored
                and self.terminals.first(inner) & self.terminals.first(ignored)
            ):
                inner = Intersection((inner, Complement(ignored)))
            self._read[known] = node if inner is node.inner else Lexeme(inner)
        return self._read[known]


def _not_empty(node: Tree, terminals: Terminals) -> Tree:
    if isinstance(node, Repetition) and not terminals.nullable(node.inner):
        return Repetition(node.inner, max(node.least, 1), node.most)
    return Intersection((node, SOMETHING))


def _write_rules(rules: Rules, made: Productions) -> Symbol:
    """The rules of all that is reached from the start."""
    names: dict[Key, Symbol] = {}
    waiting = [_meant(made, made.start)]
    while waiting:
        key = waiting.pop()
        if key not in names:
            names[key] = rules.reserve()
            waiting += [
                _meant(made, part) for one in made.found[key] for part in one if isinstance(part, Key)
            ]

    def body(production: Production) -> str:
        parts = [names[_meant(made, part)] if isinstance(part, Key) else part for part in production]
        return " ".join(parts) or NOTHING

    for key, name in names.items():
        rules.define(name, " | ".join(dict.fromkeys(map(body, made.found[key]))))
    return names[_meant(made, made.start)]


def _meant(made: Productions, key: Key) -> Key:
    """Where it is nothing but another key, that one."""
    while (
        len(made.found[key]) == 1 and len(made.found[key][0]) == 1 and isinstance(made.found[key][0][0], Key)
    ):
        key = made.found[key][0][0]
    return key
