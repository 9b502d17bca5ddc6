"""A person's grammar in Lark, as llguidance reads it, taken apart into a tree.

Schemas, special tokens, other grammars and what steers the generation are refused: they cannot be said of a
text that stands inside of a call.
"""

import json
import re
from typing import NamedTuple, NoReturn

from dragoman.constrain.grammar.expressions import PatternError, read_terminal
from dragoman.constrain.grammar.trees import (
    EMPTY,
    CharClass,
    Complement,
    Intersection,
    LarkGrammar,
    Lexeme,
    LiteralText,
    Reference,
    Tree,
    alternate,
    concatenate,
    repeat,
)

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


class UnreadGrammar(ValueError):
    """`line 3: ...`"""


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def read_lark(grammar: str) -> LarkGrammar:
    """The tree of a grammar that llguidance has compiled."""
    return _LarkReader(_tokens(grammar)).source()


def _tokens(grammar: str) -> list[_Token]:
    found, at, line = [], 0, 1
    while at < len(grammar):
        token = _TOKENS.match(grammar, at)
        if token is None:
            # Something before it may be the reason: whoever reads it says what.
            found.append(_Token("unknown", grammar[at : at + 8], line))
            break
        kind, text = token.lastgroup or "", token[0]
        if kind != "space":
            found.append(_Token(kind, text, line))
        line, at = line + text.count("\n"), token.end()
    # A bar on a new line goes on with what stands before it.
    kept = [
        token
        for number, token in enumerate(found)
        if token.kind != "newline" or (number + 1 < len(found) and found[number + 1].text != "|")
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

    # What a grammar is made of

    def _item(self) -> None:
        token = self._take()
        if token.kind == "rule" or token.kind == "terminal":
            self._definition(token)
        elif token.text == "%ignore":
            self.ignored.append(self._body(in_terminal=True))
        elif token.text == "%import":
            self._import()
        else:
            self._refuse(f"{token.text[:32]} is not understood in the grammar of a tool", token.line)

    def _definition(self, name: _Token) -> None:
        opening = self._take()
        if opening.text != ":":
            self._refuse(f"{name.text} has options, which a tool's grammar cannot have", name.line)
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
            self._refuse(f"there are more than {DEEPEST} brackets within each other", self._next.line)
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
            self._refuse("templates are not understood", self._next.line)
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
            self._refuse(f"{token.text[:32]} is not understood in the grammar of a tool", token.line)
        pattern, _, flags = token.text[1:].rpartition("/")
        return self._lexeme(self._pattern(pattern, flags, token.line))

    def _lexeme(self, node: Tree) -> Tree:
        return node if self.in_terminal or node is EMPTY else Lexeme(node)

    def _string(self, token: _Token) -> Tree:
        any_case = token.text.endswith("i")
        text = _unquote(token.text.removesuffix("i"))
        if text is None:
            self._refuse(f"{token.text[:32]} has an escape that is not known", token.line)
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
        found = self._next.text == text and self._next.kind == "sign"
        self.at += found
        return found

    def _took_kind(self, kind: str) -> bool:
        found = self._next.kind == kind
        self.at += found
        return found

    def _number(self) -> int:
        return int(self._take().text)

    def _refuse(self, what: str, line: int) -> NoReturn:
        raise UnreadGrammar(f"line {line}: {what}")


def _unquote(string: str) -> str | None:
    """What llguidance reads as a string of JSON, with `\\x41` beside it."""
    try:
        text = json.loads(re.sub(r"(\\\\)|\\x(?=[0-9a-fA-F]{2})", lambda found: found[1] or r"\u00", string))
    except ValueError:
        return None
    return str(text)
