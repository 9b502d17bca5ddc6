"""A text in quotes: its lexemes with every character as it is written there.

llguidance takes the longest lexeme and never goes back. But a backslash may begin a character of this lexeme
or of the next, and that is seen one character later. So a lexeme also comes with the backslash of the
next one at its end, and without its own at its beginning. What is longest is then found among whole
characters, as in the plain text: the same texts are accepted.
"""

from dragoman.constrain.grammar.rules import Symbol, literal
from dragoman.constrain.grammar.terminals import Terminals, first_bytes
from dragoman.constrain.grammar.trees import (
    EMPTY,
    NEVER,
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
    choice,
    repeat,
    sequence,
)
from dragoman.constrain.quoted.quotations import AHEAD, INSIDE, Unquotable

MOST_CLASSES = 500
MOST_OPTIONAL = 100
BACKSLASH = "\\"
ESCAPES = {"\\": "\\", "\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}


class Escaped:
    """In quotes, with a backslash before what cannot stand for itself.

    Each character is written in one way. Control characters without a short escape are not written.
    """

    last = INSIDE

    def __init__(self, terminals: Terminals, quote: str) -> None:
        self.plain = terminals
        self.spelled = {quote: quote, **ESCAPES}
        self.cut = rf"{quote}\\\x00-\x1f"
        self.known: dict[str, Node] = {}
        self.terminals = Terminals(terminals.rules, self.known)
        self.classes: dict[str, Node] = {}
        self._lexemes: dict[Lexeme, Node] = {}

    def lexeme(self, node: Lexeme, before: int, after: int) -> Symbol | None:
        if node not in self._lexemes:
            self._lexemes[node] = self._quoted(node.inner)
        whole = self._lexemes[node]
        rest = self._rest(whole) if before == AHEAD else whole
        if rest is NEVER or rest is EMPTY:
            return None
        body = self.terminals.written(rest)
        if ("&" in body or "~" in body or isinstance(rest, Name)) and not self.terminals.possible(body):
            return None
        if after == AHEAD:
            body = Symbol(f"{body} {literal(BACKSLASH)}")
        return self.terminals.rules.terminal(body)

    # A language with every character as it is written

    def _quoted(self, node: Node) -> Node:
        match node:
            case Text():
                return self._text(node.text)
            case Class():
                return self._class(node)
            case Name():
                if node.name not in self.known:
                    self.known[node.name] = self._quoted(self.plain.known[node.name])
                return NEVER if self.known[node.name] is NEVER else node
            case Sequence():
                return sequence(map(self._quoted, node.parts))
            case Choice():
                return choice(map(self._quoted, node.options))
            case Repeat():
                return repeat(self._quoted(node.inner), node.least, node.most)
            case Both():
                parts = tuple(map(self._quoted, node.parts))
                return NEVER if NEVER in parts else Both(parts)
            case Not():
                anything = Repeat(self._class(Class(r"\s\S")), 0, None)
                inner = self._quoted(node.inner)
                return anything if inner is NEVER else Both((anything, Not(inner)))
            case Lexeme():
                return self._quoted(node.inner)

    def _text(self, text: str) -> Node:
        written = [BACKSLASH + self.spelled[one] if one in self.spelled else one for one in text]
        unwritable = any(one < " " and one not in self.spelled for one in text)
        return NEVER if unwritable else Text("".join(written))

    def _class(self, node: Class) -> Node:
        if node.pattern not in self.classes:
            if len(self.classes) >= MOST_CLASSES:
                raise Unquotable(f"has more than {MOST_CLASSES} classes of characters")
            found = first_bytes(node.pattern)
            special = {one for one in self.spelled if ord(one) in found}
            changed = {byte for byte in found if byte < 32 or chr(byte) in special}
            plain = Class(f"[{node.inner}]&&[^{self.cut}]", node.any_case) if changed else node
            letters = choice(Text(self.spelled[one]) for one in self.spelled if one in special)
            options = [NEVER if changed == found else plain, sequence([Text(BACKSLASH), letters])]
            self.classes[node.pattern] = choice(options)
        return self.classes[node.pattern]

    # The same after a backslash was read: no class has one, so only texts do

    def _rest(self, node: Node) -> Node:
        match node:
            case Text():
                return Text(node.text[1:]) if node.text.startswith(BACKSLASH) else NEVER
            case Name():
                name = node.name + BACKSLASH
                if name not in self.known:
                    self.known[name] = self._rest(self.known[node.name])
                return NEVER if self.known[name] is NEVER else Name(name, node.line)
            case Sequence():
                return self._rest_of(node.parts)
            case Choice():
                return choice(map(self._rest, node.options))
            case Repeat():
                most = None if node.most is None else node.most - 1
                return sequence([self._rest(node.inner), repeat(node.inner, max(node.least - 1, 0), most)])
            case Both():
                parts = tuple(map(self._rest, node.parts))
                return NEVER if NEVER in parts else Both(parts)
            case Not():
                # It stands beside what any text may be, and that is what it then leaves.
                inner = self._rest(node.inner)
                return Repeat(Class(r"\s\S"), 0, None) if inner is NEVER else Not(inner)
            case Class() | Lexeme():
                return NEVER

    def _rest_of(self, parts: tuple[Node, ...]) -> Node:
        found = []
        for at, part in enumerate(parts):
            found.append(sequence([self._rest(part), *parts[at + 1 :]]))
            if not self.terminals.nullable(part):
                break
            if at > MOST_OPTIONAL:
                raise Unquotable("begins a terminal with more parts than can be left out")
        return choice(found)
