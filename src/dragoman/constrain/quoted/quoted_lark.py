"""The text of a custom tool, in the language of a client's grammar, as it is written inside a call.

The grammar, Lark as llguidance reads it, is first parsed into a tree. Schemas, special tokens, nested
grammars and generation options are refused: they cannot apply to text inside a call.
"""

import json
import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from dragoman.constrain.grammar.expressions import PatternError, read_terminal
from dragoman.constrain.grammar.lark_builder import LarkBuilder, Symbol, either, literal
from dragoman.constrain.grammar.trees import (
    EMPTY,
    CharClass,
    Complement,
    Intersection,
    LarkGrammar,
    Lexeme,
    LiteralText,
    Reference,
    Repetition,
    Terminals,
    Tree,
    alternate,
    concatenate,
    repeat,
)
from dragoman.constrain.quoted.productions import (
    AHEAD,
    FRESH,
    INSIDE,
    Production,
    ProductionKey,
    Productions,
    QuotingScheme,
    UnquotableGrammar,
    find_following,
)
from dragoman.constrain.quoted.schemes import EscapedQuoting, RawQuoting
from dragoman.errors import BadRequest

# Lark


_DECIMAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_EXPONENT = r"(?:[eE][+-]?[0-9]+)"
_FLOAT = rf"(?:[0-9]+{_EXPONENT}|{_DECIMAL}{_EXPONENT}?)"
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": _DECIMAL,
    "_EXP": _EXPONENT,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"(?:{_FLOAT}|[0-9]+)",
    "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|[0-9]+)",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}

DEEPEST = 100
_TOKENS = re.compile(
    r"""(?P<space> [ \t]+ | (?:\#|//)[^\n]* )
      | (?P<newline> (?:\r?\n)+ )
      | (?P<rule> !?[_?]?[a-z][_a-z0-9\-]* )
      | (?P<terminal> _?[A-Z][_A-Z0-9\-]* )
      | (?P<string> "(?:\\.|[^"\\])*"i? )
      | (?P<regexp> /(?:\\.|[^/\\])+/[imslux]* )
      | (?P<number> [0-9]+ )
      | (?P<special> <[^<>\s]+> | @[a-zA-Z0-9_\-]+ | %(?:json|regex|lark|llguidance|override|declare)\b )
      | (?P<sign> %ignore\b | %import\b | -> | \.\. | [:|()\[\]{}?*+~&,.] )""",
    re.VERBOSE | re.DOTALL,
)
_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class GrammarSyntaxError(ValueError):
    """Unsupported grammar, with the line: `line 3: ...`."""


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def read_lark(grammar: str) -> LarkGrammar:
    """Parse a grammar that llguidance has compiled."""
    return _LarkReader(_tokens(grammar)).source()


def _tokens(grammar: str) -> list[_Token]:
    items, at, line = [], 0, 1
    while at < len(grammar):
        token = _TOKENS.match(grammar, at)
        if token is None:
            # Text before it may be the cause: the parser reports that.
            items.append(_Token("unknown", grammar[at : at + 8], line))
            break
        kind, text = token.lastgroup or "", token[0]
        if kind != "space":
            items.append(_Token(kind, text, line))
        line, at = line + text.count("\n"), token.end()
    # A bar on a new line continues the line before it.
    kept = [
        token
        for number, token in enumerate(items)
        if token.kind != "newline" or (number + 1 < len(items) and items[number + 1].text != "|")
    ]
    return [*kept, _Token("end", "", line)]


class _LarkReader:
    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.in_terminal = False
        self.rules: dict[str, Tree] = {}
        self.terminals: dict[str, Tree] = {}
        self.ignored: list[Tree] = []

    def source(self) -> LarkGrammar:
        while self._next.kind != "end":
            if not self._took_kind("newline"):
                self._item()
        return LarkGrammar(self.rules, self.terminals, alternate(self.ignored) if self.ignored else None)

    # Items of a grammar

    def _item(self) -> None:
        token = self._take()
        if token.kind == "rule" or token.kind == "terminal":
            self._definition(token)
        elif token.text == "%ignore":
            self.ignored.append(self._body(in_terminal=True))
        elif token.text == "%import":
            self._import()
        else:
            self._refuse(f"{token.text[:32]} is not supported in a tool's grammar", token.line)

    def _definition(self, name: _Token) -> None:
        opening = self._take()
        if opening.text != ":":
            self._refuse(f"{name.text} has options, which are not supported in a tool's grammar", name.line)
        body = self._body(in_terminal=name.kind == "terminal")
        (self.terminals if name.kind == "terminal" else self.rules)[name.text.lstrip("!?")] = body

    def _import(self) -> None:
        self._take()
        if self._took("("):
            names = []
            while not self._took(")"):
                names.append(self._take().text)
                self._took(",")
        else:
            self._took(".")
            names = [self._take().text]
        called = self._take().text if self._took("->") else names[0]
        for name in names:
            self.terminals[called if len(names) == 1 else name] = read_terminal(COMMON[name])

    # Bodies

    def _body(self, *, in_terminal: bool) -> Tree:
        self.in_terminal = in_terminal
        return self._options(0)

    def _options(self, depth: int) -> Tree:
        if depth > DEEPEST:
            self._refuse(f"there are more than {DEEPEST} nested brackets", self._next.line)
        options = [self._all_of(depth)]
        while self._took("|"):
            options.append(self._all_of(depth))
        return alternate(options)

    def _all_of(self, depth: int) -> Tree:
        parts = [self._sequence(depth)]
        while self._took("&"):
            parts.append(self._sequence(depth))
        if self._took("->"):
            self._take()
        return parts[0] if len(parts) == 1 else Intersection(tuple(parts))

    def _sequence(self, depth: int) -> Tree:
        parts = []
        while self._next.kind != "end" and self._next.text not in ("|", "&", ")", "]", "->"):
            if self._next.kind == "newline":
                if not depth:
                    break
                self._take()
            else:
                parts.append(self._repeat(depth))
        return concatenate(parts)

    def _repeat(self, depth: int) -> Tree:
        atom = self._atom(depth)
        times = _TIMES.get(self._next.text)
        if times:
            self._take()
            return repeat(atom, *times)
        if self._next.text == "~" and self.tokens[self.at + 1].kind == "number":
            self._take()
            least = self._number()
            return repeat(atom, least, self._number() if self._took("..") else least)
        if not self._took("{"):
            return atom
        if self._next.kind != "number" and self._next.text != ",":
            self._refuse("templates are not supported", self._next.line)
        least = self._number() if self._next.kind == "number" else 0
        most: int | None = least
        if self._took(","):
            most = self._number() if self._next.kind == "number" else None
        self._took("}")
        return repeat(atom, least, most)

    def _atom(self, depth: int) -> Tree:
        token = self._take()
        match token.kind, token.text:
            case _, "(":
                inner = self._options(depth + 1)
                self._took(")")
                return inner
            case _, "[":
                inner = self._options(depth + 1)
                self._took("]")
                return repeat(inner, 0, 1)
            case _, "~":
                outside, self.in_terminal = self.in_terminal, True
                inner = Complement(self._atom(depth + 1))
                self.in_terminal = outside
                return self._lexeme(inner)
            case "rule", _:
                return Reference(token.text, token.line)
            case "terminal", _:
                return self._lexeme(Reference(token.text, token.line))
            case "string", _:
                return self._lexeme(self._string(token))
        if token.kind != "regexp":
            self._refuse(f"{token.text[:32]} is not supported in a tool's grammar", token.line)
        pattern, _, flags = token.text[1:].rpartition("/")
        return self._lexeme(self._pattern(pattern, flags, token.line))

    def _lexeme(self, node: Tree) -> Tree:
        return node if self.in_terminal or node is EMPTY else Lexeme(node)

    def _string(self, token: _Token) -> Tree:
        any_case = token.text.endswith("i")
        text = _unquote(token.text.removesuffix("i"))
        if text is None:
            self._refuse(f"{token.text[:32]} has an unknown escape", token.line)
        if self._took(".."):
            last = _unquote(self._take().text)
            return CharClass(rf"\x{{{ord(text):x}}}-\x{{{ord(last or text):x}}}")
        return (
            self._pattern(re.escape(text), "i", token.line)
            if any_case
            else concatenate([LiteralText(text)][: len(text)])
        )

    def _pattern(self, pattern: str, flags: str, line: int) -> Tree:
        try:
            return read_terminal(pattern, flags)
        except PatternError as error:
            self._refuse(f"the expression {error}", line)

    # Tokens

    @property
    def _next(self) -> _Token:
        return self.tokens[self.at]

    def _take(self) -> _Token:
        token = self.tokens[self.at]
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def _took(self, text: str) -> bool:
        outcome = self._next.text == text and self._next.kind == "sign"
        self.at += outcome
        return outcome

    def _took_kind(self, kind: str) -> bool:
        outcome = self._next.kind == kind
        self.at += outcome
        return outcome

    def _number(self) -> int:
        return int(self._take().text)

    def _refuse(self, what: str, line: int) -> NoReturn:
        raise GrammarSyntaxError(f"line {line}: {what}")


def _unquote(string: str) -> str | None:
    """Decode a string as llguidance does: JSON, and also `\\\\x41`."""
    try:
        text = json.loads(re.sub(r"(\\\\)|\\x(?=[0-9a-fA-F]{2})", lambda match: match[1] or r"\u00", string))
    except ValueError:
        return None
    return str(text)


# Texts inside calls


NOTHING = Symbol('""')
SOMETHING = Repetition(CharClass(r"\s\S"), 1, None)


class QuotedLark:
    """Texts of one grammar, which llguidance has compiled before; error messages call it `param`."""

    def __init__(self, rules: LarkBuilder, grammar: str, param: str) -> None:
        self.rules = rules
        self.param = param
        try:
            self.source = read_lark(grammar)
        except GrammarSyntaxError as error:
            message = f"'{param}' cannot be enforced inside a call: {error}."
            raise BadRequest(message, param=param, code="invalid_grammar") from error
        self.terminals = Terminals(rules, self.source.terminals)
        self._read: dict[tuple[Lexeme, bool], Lexeme] = {}

    def write_escaped(self, quote: str) -> Symbol:
        """Write the grammar of the text in quotes, as in JSON."""
        inside = self._write(lambda: EscapedQuoting(self.terminals, quote), NOTHING)
        return self.rules.rule(f"{literal(quote)} {inside} {literal(quote)}")

    def write_raw(self, end: str, mark: str) -> Symbol:
        """Write the grammar of the unchanged text, then `end`. The text cannot contain `mark`, unless it is a
        special token.
        """
        return self._write(lambda: self._raw(end, mark), self.rules.sequence(end))

    def _raw(self, end: str, mark: str) -> RawQuoting:
        plain = Productions(
            self.source, lambda node, before, _: self._lexeme(node, before), self._nullable, [INSIDE], INSIDE
        )
        return RawQuoting(self.terminals, end, mark, find_following(plain, self.terminals))

    def _write(self, quotation: Callable[[], QuotingScheme], nothing: Symbol) -> Symbol:
        try:
            symbol = self._texts(quotation(), nothing)
        except UnquotableGrammar as error:
            why = str(error)
        except RecursionError:
            why = "has too many nested terminals"
        else:
            if symbol is not None:
                return symbol
            why = "allows none that can be written there"
        message = f"No text of '{self.param}' can be written in this model's call syntax: it {why}."
        raise BadRequest(message, param=self.param, code="invalid_grammar")

    def _texts(self, quotation: QuotingScheme, nothing: Symbol) -> Symbol | None:
        def leaf(node: Lexeme, before: int, after: int) -> Symbol | None:
            return quotation.lexeme(self._lexeme(node, before), before, after)

        result = Productions(self.source, leaf, self._nullable, [INSIDE, AHEAD], quotation.last)
        ways = [nothing] if result.empty in result.productions else []
        if result.start in result.productions:
            ways.append(_write_rules(self.rules, result))
        return self.rules.rule(either(ways)) if ways else None

    def _nullable(self, node: Tree) -> bool:
        return self.terminals.nullable(node)

    def _lexeme(self, node: Lexeme, before: int) -> Lexeme:
        """Return the part that is read as one lexeme: never empty, and never ignored text where that is
        allowed.
        """
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


def _write_rules(rules: LarkBuilder, result: Productions) -> Symbol:
    """Write the rules of everything reachable from the start."""
    names: dict[ProductionKey, Symbol] = {}
    waiting = [_meant(result, result.start)]
    while waiting:
        key = waiting.pop()
        if key not in names:
            names[key] = rules.reserve()
            waiting += [
                _meant(result, part)
                for one in result.productions[key]
                for part in one
                if isinstance(part, ProductionKey)
            ]

    def body(production: Production) -> str:
        parts = [
            names[_meant(result, part)] if isinstance(part, ProductionKey) else part for part in production
        ]
        return " ".join(parts) or NOTHING

    for key, name in names.items():
        rules.define(name, " | ".join(dict.fromkeys(map(body, result.productions[key]))))
    return names[_meant(result, result.start)]


def _meant(result: Productions, key: ProductionKey) -> ProductionKey:
    """Return the key, or the one that it is an alias of."""
    while (
        len(result.productions[key]) == 1
        and len(result.productions[key][0]) == 1
        and isinstance(result.productions[key][0][0], ProductionKey)
    ):
        key = result.productions[key][0][0]
    return key
