"""A text between tags, or between marks that know no escapes: its lexemes as they are, up to its end."""

from collections.abc import Mapping, Sequence

from dragoman.constrain.grammar.rules import Symbol, either, literal
from dragoman.constrain.grammar.terminals import Terminals
from dragoman.constrain.grammar.trees import Lexeme, Text
from dragoman.constrain.quoted.quotations import AHEAD, Unquotable

ANYTHING = "/(?s:.*)/"


class Raw:
    """As it is, up to what ends it, which is never a part of the text.

    `mark` is what the text must not have in it; `follow` says of each lexeme which bytes may come next.
    """

    last = AHEAD

    def __init__(
        self, terminals: Terminals, end: str, mark: str, follow: Mapping[Lexeme, frozenset[int]]
    ) -> None:
        self.terminals = terminals
        self.rules = terminals.rules
        self.end = end
        self.mark = mark if self.rules.is_text(mark) else ""
        self.follow = follow
        self._written: dict[tuple[Lexeme, int], Symbol | None] = {}

    def lexeme(self, node: Lexeme, before: int, after: int) -> Symbol | None:
        if before == AHEAD:
            return None
        if (node, after) not in self._written:
            self._written[node, after] = self._ended(node) if after == AHEAD else self._within(node)
        return self._written[node, after]

    def _within(self, node: Lexeme) -> Symbol | None:
        return self._limited(node, self._begun(node))

    def _limited(self, node: Lexeme, begun: Sequence[str] = ()) -> Symbol | None:
        """The lexeme without the mark in it, and without these at its end."""
        body = self.terminals.written(node)
        limits = [f"~({ANYTHING} {either(map(literal, begun))})"] if begun else []
        if self.mark and self._may_be(node, f"({ANYTHING} {literal(self.mark)} {ANYTHING})", self.mark[0]):
            limits.append(f"~({ANYTHING} {literal(self.mark)} {ANYTHING})")
        if not limits and not self.rules.banned:
            return self.rules.terminal(body)
        whole = " & ".join([body, self.rules.any, *limits])
        return self.rules.terminal(whole) if self.terminals.possible(whole) else None

    def _begun(self, node: Lexeme) -> list[str]:
        """Parts of the mark that the lexeme may end with and the next one go on with.

        A lexeme that is kept from that must be one that can go on: else a shorter one would be read instead.
        """
        follow = self.follow.get(node, frozenset())
        parts = [self.mark[:at] for at in range(1, len(self.mark)) if self.mark[at].encode()[0] in follow]
        if not parts or not self._may_be(node, f"({ANYTHING} {either(map(literal, parts))})", self.mark[0]):
            return []
        if not self.terminals.goes_on(node, frozenset(self.mark.encode())):
            message = f"can write {self.mark!r} in several lexemes, and that ends a text"
            raise Unquotable(message)
        return parts

    def _ended(self, node: Lexeme) -> Symbol | None:
        """The lexeme and the end of the text: one lexeme where the first could go on into the second."""
        alone = self._limited(node)
        if alone is None:
            return None
        first = self.rules.pieces(self.end)[0]
        if isinstance(first, int) or not self._may_be(
            node, f"({self.terminals.written(node)} {literal(first[0])} {ANYTHING})", first[0]
        ):
            return self.rules.rule(self.rules.sequence(alone, self.end))
        return self.rules.ended(self.end, alone, core=self.mark or None)

    def _may_be(self, node: Lexeme, language: str, sign: str) -> bool:
        """Whether a text of the lexeme is in this language, in all of whose texts there is the sign."""
        if isinstance(node.inner, Text) and sign not in node.inner.text:
            return False
        return self.terminals.possible(f"{self.terminals.written(node)} & {language}")
