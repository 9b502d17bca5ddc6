"""How a lexeme is written inside a call, between two states of the text (see productions.py).

`EscapedQuoting` is for text in quotes, with backslashes. `RawQuoting` is for text between tags, or between
marks without escapes: its lexemes are unchanged, and it ends with the tag.
"""

from collections.abc import Collection, Mapping

from dragoman.constrain.grammar.lark_builder import Symbol, either, literal
from dragoman.constrain.grammar.trees import (
    EMPTY,
    NEVER,
    Alternation,
    CharClass,
    Complement,
    Concatenation,
    Intersection,
    Lexeme,
    LiteralText,
    Reference,
    Repetition,
    Terminals,
    Tree,
    alternate,
    concatenate,
    first_bytes,
    rebuild,
    repeat,
)
from dragoman.constrain.quoted.productions import AHEAD, INSIDE, UnquotableGrammar

MOST_CLASSES = 500
MOST_OPTIONAL = 100
BACKSLASH = "\\"
ESCAPES = {"\\": "\\", "\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}


class EscapedQuoting:
    """Quoting with a backslash before characters that need one.

    Each character has one spelling. Control characters without a short escape are not written. In state AHEAD
    after a lexeme, the backslash of the next one was read with it; before a lexeme, its own was read with the
    previous one.
    """

    last = INSIDE

    def __init__(self, terminals: Terminals, quote: str) -> None:
        self.plain = terminals
        self.spelled = {quote: quote, **ESCAPES}
        self.cut = rf"{quote}\\\x00-\x1f"
        self.known: dict[str, Tree] = {}
        self.terminals = Terminals(terminals.rules, self.known)
        self.classes: dict[str, Tree] = {}
        self._lexemes: dict[Lexeme, Tree] = {}

    def lexeme(self, node: Lexeme, before: int, after: int) -> Symbol | None:
        if node not in self._lexemes:
            self._lexemes[node] = self._quote(node.inner)
        whole = self._lexemes[node]
        rest = self._after_backslash(whole) if before == AHEAD else whole
        if rest is NEVER or rest is EMPTY:
            return None
        body = self.terminals.write(rest)
        uncertain = "&" in body or "~" in body or isinstance(rest, Reference)
        if uncertain and not self.terminals.is_possible(body):
            return None
        if after == AHEAD:
            body = Symbol(f"{body} {literal(BACKSLASH)}")
        return self.terminals.rules.terminal(body)

    # A language with every character as it is written

    def _quote(self, node: Tree) -> Tree:
        match node:
            case LiteralText():
                return self._quote_text(node.text)
            case CharClass():
                return self._quote_class(node)
            case Reference():
                if node.name not in self.known:
                    self.known[node.name] = self._quote(self.plain.known[node.name])
                return NEVER if self.known[node.name] is NEVER else node
            case Complement():
                anything = Repetition(self._quote_class(CharClass(r"\s\S")), 0, None)
                inner = self._quote(node.inner)
                return anything if inner is NEVER else Intersection((anything, Complement(inner)))
        return rebuild(node, self._quote)

    def _quote_text(self, text: str) -> Tree:
        written = [BACKSLASH + self.spelled[char] if char in self.spelled else char for char in text]
        unwritable = any(char < " " and char not in self.spelled for char in text)
        return NEVER if unwritable else LiteralText("".join(written))

    def _quote_class(self, node: CharClass) -> Tree:
        if node.pattern not in self.classes:
            if len(self.classes) >= MOST_CLASSES:
                raise UnquotableGrammar(f"has more than {MOST_CLASSES} character classes")
            numbers = first_bytes(node.pattern)
            special = {one for one in self.spelled if ord(one) in numbers}
            changed = {byte for byte in numbers if byte < 32 or chr(byte) in special}
            plain = CharClass(f"[{node.inner}]&&[^{self.cut}]", node.any_case) if changed else node
            letters = alternate(LiteralText(self.spelled[one]) for one in self.spelled if one in special)
            options = [NEVER if changed == numbers else plain, concatenate([LiteralText(BACKSLASH), letters])]
            self.classes[node.pattern] = alternate(options)
        return self.classes[node.pattern]

    # The same after a backslash was read: no class contains one, so only texts do

    def _after_backslash(self, node: Tree) -> Tree:
        match node:
            case LiteralText():
                return LiteralText(node.text[1:]) if node.text.startswith(BACKSLASH) else NEVER
            case Reference():
                name = node.name + BACKSLASH
                if name not in self.known:
                    self.known[name] = self._after_backslash(self.known[node.name])
                return NEVER if self.known[name] is NEVER else Reference(name, node.line)
            case Concatenation():
                return self._after_backslash_of(node.parts)
            case Alternation():
                return alternate(map(self._after_backslash, node.options))
            case Repetition():
                most = None if node.most is None else node.most - 1
                return concatenate(
                    [self._after_backslash(node.inner), repeat(node.inner, max(node.least - 1, 0), most)]
                )
            case Intersection():
                parts = tuple(map(self._after_backslash, node.parts))
                return NEVER if NEVER in parts else Intersection(parts)
            case Complement():
                # The complement is intersected with all texts, so that remains.
                inner = self._after_backslash(node.inner)
                return Repetition(CharClass(r"\s\S"), 0, None) if inner is NEVER else Complement(inner)
            case CharClass() | Lexeme():
                return NEVER

    def _after_backslash_of(self, parts: tuple[Tree, ...]) -> Tree:
        items = []
        for at, part in enumerate(parts):
            items.append(concatenate([self._after_backslash(part), *parts[at + 1 :]]))
            if not self.terminals.nullable(part):
                break
            if at > MOST_OPTIONAL:
                raise UnquotableGrammar("begins a terminal with too many optional parts")
        return alternate(items)


ANYTHING = "/(?s:.*)/"


class RawQuoting:
    """No quoting: text is unchanged up to its end marker, which is never part of the text.

    `mark` is what the text must not contain; `follow` maps each lexeme to the bytes that may come next.
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
            self._written[node, after] = (
                self._write_ended(node) if after == AHEAD else self._limit(node, self._begun_marks(node))
            )
        return self._written[node, after]

    def _limit(self, node: Lexeme, begun: Collection[str] = ()) -> Symbol | None:
        """Return the lexeme without the mark in it, and without these texts at its end."""
        body = self.terminals.write(node)
        limits = [f"~({ANYTHING} {either(map(literal, begun))})"] if begun else []
        if self.mark and self._may_be(node, f"({ANYTHING} {literal(self.mark)} {ANYTHING})", self.mark[0]):
            limits.append(f"~({ANYTHING} {literal(self.mark)} {ANYTHING})")
        if not limits and not self.rules.banned:
            return self.rules.terminal(body)
        whole = " & ".join([body, self.rules.any, *limits])
        return self.rules.terminal(whole) if self.terminals.is_possible(whole) else None

    def _begun_marks(self, node: Lexeme) -> list[str]:
        """Return prefixes of the mark that the lexeme may end with and the next lexeme may complete.

        A lexeme that must not end so must be extensible: otherwise a shorter one would be read instead.
        """
        follow = self.follow.get(node, frozenset())
        parts = [self.mark[:at] for at in range(1, len(self.mark)) if self.mark[at].encode()[0] in follow]
        if not parts or not self._may_be(node, f"({ANYTHING} {either(map(literal, parts))})", self.mark[0]):
            return []
        if not self.terminals.goes_on(node, frozenset(self.mark.encode())):
            message = f"can write {self.mark!r}, which ends a text, in several lexemes"
            raise UnquotableGrammar(message)
        return parts

    def _write_ended(self, node: Lexeme) -> Symbol | None:
        """Return the lexeme and the end of the text: one lexeme if the first could extend into the second."""
        alone = self._limit(node)
        if alone is None:
            return None
        first = self.rules.pieces(self.end)[0]
        if isinstance(first, int) or not self._may_be(
            node, f"({self.terminals.write(node)} {literal(first[0])} {ANYTHING})", first[0]
        ):
            return self.rules.rule(self.rules.sequence(alone, self.end))
        return self.rules.text_until(self.end, alone, core=self.mark or None)

    def _may_be(self, node: Lexeme, language: str, sign: str) -> bool:
        """Whether a text of the lexeme is in this language, whose texts all contain the sign."""
        if isinstance(node.inner, LiteralText) and sign not in node.inner.text:
            return False
        return self.terminals.is_possible(f"{self.terminals.write(node)} & {language}")
