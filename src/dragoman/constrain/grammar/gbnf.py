r"""GBNF, llama.cpp's notation for grammars: parsed into trees, and written as Lark that accepts the same
texts.

    root ::= "a" b*     becomes     start: T1
    b ::= [x-z]                     T0: /[x-z]/
                                    T1: ("a" (T0){0,})

llama.cpp reads character by character. llguidance cuts a text into lexemes, always the longest, and never
backtracks: `[a-z]* "b"` as two lexemes accepts nothing, because the first takes the `b`. Therefore:

- A rule that does not lead back to itself is a regular expression, and becomes a terminal. A grammar without
  recursion becomes a single lexeme, in which nothing is cut.
- In recursive rules every character is a lexeme, as in llama.cpp. That is exact but slow, especially in
  strings.
- Runs such as `"\\"" [^"]* "\\""` therefore become lexemes where the longest is the only one possible: no
  text of the run extends to another text of it, and no other lexeme is a prefix of one.
"""

import re
from collections.abc import Collection, Iterator, Mapping

from dragoman.constrain.grammar.expressions import ANYTHING, escape_character
from dragoman.constrain.grammar.lark_builder import (
    MOST_DEPTH,
    LarkBuilder,
    Symbol,
    count_depth,
    either,
    literal,
    regex,
)
from dragoman.constrain.grammar.trees import (
    NEVER,
    Alternation,
    CharClass,
    Concatenation,
    LiteralText,
    Reference,
    Repetition,
    Terminals,
    Tree,
    alternate,
    grow,
    repeat,
    walk_tree,
)

_DEEPEST = 100
_MOST_REPEATS = 100_000
_MOST_RUNS = 16
"""Maximum number of runs that are tried, each with a query to llguidance."""
_MOST_SHORTENED = 4
_MOST_LEAVES = 500
_MOST_ROUNDS = 3

_TOKENS = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    | (?P<is>::=)
    | (?P<name>[A-Za-z0-9_-]+)
    | (?P<text>"(?:[^"\\]|\\.)*")
    | (?P<class>\[(?:[^\]\\]|\\.)*\])
    | (?P<token><\[[0-9]+\]>|<[^<>\s]+>)
    | (?P<count>\{[ ]*[0-9]{1,9}[ ]*(?:,[ ]*[0-9]{0,9}[ ]*)?\})
    | (?P<mark>[|()*+?.;])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}


class GbnfError(ValueError):
    """Error in a GBNF grammar, with the line."""


def gbnf_to_lark(grammar: str) -> str:
    rules = read_gbnf(grammar)
    if count_depth({name: sorted(_names(rule)) for name, rule in rules.items()}, "root") > MOST_DEPTH:
        raise GbnfError(f"names refer to each other more than {MOST_DEPTH} levels deep")
    order = _reach(rules)
    ending = grow(order, lambda name, known: _prune(rules[name], known) is not NEVER)
    if "root" not in ending:
        raise GbnfError("root refers to itself in all its alternatives, so no text is ever complete")
    rules = {name: _prune(rules[name], ending) for name in ending}
    return _GbnfWriter(rules).grammar()


# Reading


def read_gbnf(grammar: str) -> dict[str, Tree]:
    """Parse the rules by name. All names that occur are defined, and `root` is.

    A special token, such as `<think>` or `<[128010]>`, is a reference with that name. Grammars in TabbyAPI's
    documentation begin with `start` and have a semicolon after each rule.
    """
    rules = dict(_GbnfReader(grammar).rules())
    if "start" in rules:
        rules.setdefault("root", Reference("start", 1))
    if "root" not in rules:
        raise GbnfError("the rule root is missing")
    for rule in rules.values():
        for node in walk_tree(rule):
            if isinstance(node, Reference) and not _is_token(node.name) and node.name not in rules:
                raise GbnfError(f"line {node.line} uses the undefined rule {node.name}")
    return rules


def write_plain(grammar: str) -> str:
    """Return the grammar for engines that require `root` as start and do not accept semicolons."""
    names = {name for name, _ in _GbnfReader(grammar).rules()}
    begun = "" if "root" in names else "\nroot ::= start\n"
    return (
        "".join("\n" if match.group() == ";" else match.group() for match in _TOKENS.finditer(grammar))
        + begun
    )


def _is_token(name: str) -> bool:
    return name.startswith("<")


class _GbnfReader:
    def __init__(self, grammar: str) -> None:
        self.tokens = list(_tokens(grammar))
        self.at = 0

    def rules(self) -> Iterator[tuple[str, Tree]]:
        while self.at < len(self.tokens):
            _, name, line = self.tokens[self.at]
            if not self._begins_rule():
                raise GbnfError(f"line {line}: a rule must begin with a name and ::=")
            self.at += 2
            yield name, self._options(0)
            self._took(";")
            if self.at < len(self.tokens) and not self._begins_rule():
                raise GbnfError(f"line {self.tokens[self.at][2]}: {self.tokens[self.at][1]} is unexpected")

    def _begins_rule(self) -> bool:
        return [kind for kind, _, _ in self.tokens[self.at : self.at + 2]] == ["name", "is"]

    def _options(self, depth: int) -> Tree:
        options = [self._sequence(depth)]
        while self._took("|"):
            options.append(self._sequence(depth))
        return alternate(options)

    def _sequence(self, depth: int) -> Tree:
        parts: list[Tree] = []
        while self.at < len(self.tokens) and not self._begins_rule():
            kind, text, line = self.tokens[self.at]
            if kind == "mark" and text in "|);":
                break
            self.at += 1
            part = self._group(depth, line) if text == "(" else _read_atom(kind, text, line)
            parts.append(self._repeat(part))
        if NEVER in parts:
            return NEVER
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _group(self, depth: int, line: int) -> Tree:
        if depth >= _DEEPEST:
            raise GbnfError(f"line {line}: more than {_DEEPEST} nested groups")
        inside = self._options(depth + 1)
        if not self._took(")"):
            raise GbnfError(f"line {line}: ( has no )")
        return inside

    def _took(self, mark: str) -> bool:
        outcome = self.at < len(self.tokens) and self.tokens[self.at][:2] == ("mark", mark)
        self.at += outcome
        return outcome

    def _repeat(self, part: Tree) -> Tree:
        start = self.at
        while self.at < len(self.tokens):
            kind, text, line = self.tokens[self.at]
            if self.at - start > _DEEPEST:
                raise GbnfError(f"line {line}: more than {_DEEPEST} nested repetitions")
            if kind == "count":
                least, comma, most = text.strip("{} ").partition(",")
                bounds = int(least), int(most) if most.strip() else None if comma else int(least)
                if bounds[1] is not None and not bounds[0] <= bounds[1]:
                    raise GbnfError(f"line {line}: the maximum in {text} is less than the minimum")
                if max(bounds[0], bounds[1] or 0) > _MOST_REPEATS:
                    raise GbnfError(f"line {line}: {text} has more than {_MOST_REPEATS} repetitions")
            elif kind == "mark" and text in "*+?":
                bounds = int(text == "+"), 1 if text == "?" else None
            else:
                break
            self.at += 1
            part = repeat(part, *bounds)
        return part


def _tokens(grammar: str) -> Iterator[tuple[str, str, int]]:
    at, line = 0, 1
    while at < len(grammar):
        match = _TOKENS.match(grammar, at)
        if match is None or match.lastgroup is None:
            raise GbnfError(f"line {line}: {grammar[at : at + 20].splitlines()[0]} cannot be read")
        if match.lastgroup != "space":
            yield match.lastgroup, match.group(), line
        line += match.group().count("\n")
        at = match.end()


def _read_atom(kind: str, text: str, line: int) -> Tree:
    match kind, text:
        case "text", _:
            return LiteralText("".join(_characters(text[1:-1], line)))
        case "class", _:
            return _read_class(text[1:-1], line)
        case (("token" | "name"), _):
            return Reference(text, line)
        case "mark", ".":
            return CharClass(ANYTHING)
    raise GbnfError(f"line {line}: {text[:20]} is unexpected")


def _characters(text: str, line: int) -> Iterator[str]:
    at = 0
    while at < len(text):
        escape = _ESCAPE.match(text, at)
        if escape is None:
            yield text[at]
            at += 1
            continue
        at = escape.end()
        code = next((part for part in escape.groups()[:3] if part), None)
        yield _read_code(int(code, 16), line) if code else _read_letter(escape[4], line)


def _read_letter(letter: str, line: int) -> str:
    if letter.isalnum() and letter not in _LETTERS:
        raise GbnfError(f"line {line}: \\{letter} is an unknown escape")
    return _LETTERS.get(letter, letter)


def _read_code(code: int, line: int) -> str:
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise GbnfError(f"line {line}: an invalid code point")
    return chr(code)


def _read_class(text: str, line: int) -> Tree:
    """Parse `^a-z\\\\n`, the contents of brackets."""
    negated = text.startswith("^")
    # An escaped hyphen is a character; only a bare one makes a range.
    pieces = [match.group() for match in re.finditer(rf"{_ESCAPE.pattern}|.", text[negated:], re.DOTALL)]
    members, at = [], 0
    while at < len(pieces):
        first = last = next(_characters(pieces[at], line))
        if pieces[at + 1 : at + 2] == ["-"] and at + 2 < len(pieces):
            last = next(_characters(pieces[at + 2], line))
            at += 2
        if last < first:
            raise GbnfError(f"line {line}: the range {first}-{last} is reversed")
        members.append(escape_character(first) + (f"-{escape_character(last)}" if last > first else ""))
        at += 1
    if not members:
        return CharClass(ANYTHING) if negated else NEVER
    return CharClass("^" * negated + "".join(members))


# Properties of rules


def _names(tree: Tree) -> set[str]:
    return {node.name for node in walk_tree(tree) if isinstance(node, Reference)}


def _reach(rules: Mapping[str, Tree]) -> list[str]:
    """Return the rules that `root` needs, itself first."""
    fields = {"root": None}
    waiting = ["root"]
    while waiting:
        for name in sorted(_names(rules[waiting.pop()])):
            if name in rules and name not in fields:
                fields[name] = None
                waiting.append(name)
    return list(fields)


def _prune(tree: Tree, ending: Collection[str]) -> Tree:
    """Remove alternatives that no text ever completes: an answer that begins one could not end."""
    match tree:
        case Reference():
            return tree if tree.name in ending or _is_token(tree.name) else NEVER
        case Concatenation():
            parts = tuple(_prune(part, ending) for part in tree.parts)
            return NEVER if NEVER in parts else Concatenation(parts)
        case Alternation():
            return alternate(_prune(option, ending) for option in tree.options)
        case Repetition():
            return repeat(_prune(tree.inner, ending), tree.least, tree.most)
    return tree


# Writing

NOTHING = '""'
Run = tuple[str, ...]
"""Beginning of a sequence, as bodies of terminals."""


class _GbnfWriter:
    def __init__(self, trees: Mapping[str, Tree]) -> None:
        self.trees = trees
        self.order = _reach(trees)
        names = {name: _names(trees[name]) for name in self.order}
        regular = grow(self.order, lambda name, known: names[name] <= known)
        self.regular = frozenset(regular)
        self.rules = LarkBuilder()
        self.terminals = Terminals(self.rules, trees)
        for name in regular:
            self.terminals.write(Reference(name, 0))
            self.terminals.nullable(Reference(name, 0))
        self._begun: dict[Tree, Run] = {}
        self.trees_of_runs: dict[Run, Tree] = {}
        self.runs: list[Run] = []
        self.names: dict[str, Symbol] = {}

    def grammar(self) -> str:
        if "root" in self.regular:
            return self.rules.grammar(self.terminals.write(Reference("root", 0)))
        self.runs = self._find_runs()
        self.names = {name: self.rules.reserve() for name in self.order}
        for name, rule in self.names.items():
            self.rules.define(rule, self._write(self.trees[name]))
        return self.rules.grammar(self.names["root"])

    def _write(self, tree: Tree) -> str:
        match tree:
            case LiteralText():
                return " ".join(map(literal, tree.text)) or NOTHING
            case CharClass():
                return regex(tree.pattern)
            case Reference():
                return self.names.get(tree.name, tree.name)
            case Concatenation():
                run = self._run_of(tree, self.runs)
                rest = [f"({self._write(part)})" for part in tree.parts[len(run) :]]
                return " ".join([self.rules.terminal(" ".join(run)), *rest] if run else rest) or NOTHING
            case Alternation():
                return " | ".join(f"({self._write(option)})" for option in tree.options)
            case Repetition():
                return f"({self._write(tree.inner)}){{{tree.least},{'' if tree.most is None else tree.most}}}"
        raise AssertionError(f"{type(tree).__name__} is not part of GBNF")

    # Runs

    def _begin(self, tree: Concatenation) -> Run:
        """Return the first parts of a sequence, as far as they are regular."""
        if tree not in self._begun:
            symbols = []
            for part in tree.parts:
                if not _names(part) <= self.regular:
                    break
                symbols.append(self.terminals.write(part))
            self._begun[tree] = tuple(symbols)
        return self._begun[tree]

    def _run_of(self, tree: Concatenation, runs: list[Run]) -> Run:
        begun = self._begin(tree) if runs else ()
        return next((run for run in runs if begun[: len(run)] == run), ())

    def _find_runs(self) -> list[Run]:
        items: list[Run] = []
        tried: set[Run] = set()
        for name in self.order:
            trees = walk_tree(self.trees[name]) if name not in self.regular else [self.trees[name]]
            for tree in trees:
                for run in self._candidates(tree) if isinstance(tree, Concatenation) else ():
                    if run in items or len(tried) >= _MOST_RUNS:
                        break
                    if run in tried:
                        continue
                    tried.add(run)
                    if self._ends_itself(" ".join(run)):
                        items.append(run)
                        break
        for _ in range(_MOST_ROUNDS):
            # A dropped run is read by characters, and other runs may then no longer be distinct from these.
            kept = [run for run in items if self._stands_out(run, items)]
            if kept == items:
                return items
            items = kept
        return []

    def _candidates(self, tree: Concatenation) -> Iterator[Run]:
        """Yield beginnings of a sequence, longest first, that are worth trying as runs."""
        begun = self._begin(tree)
        for end in range(len(begun), max(1, len(begun) - _MOST_SHORTENED), -1):
            parts = Concatenation(tree.parts[:end])
            endless = any(isinstance(node, Repetition) and node.most is None for node in walk_tree(parts))
            if endless and not self.terminals.nullable(parts):
                self.trees_of_runs[begun[:end]] = parts
                yield begun[:end]

    def _ends_itself(self, run: str) -> bool:
        """Whether no text of the run is a proper prefix of another text of it."""
        return not self.terminals.is_possible(f"({run}) & ({run} /(?s:.)/+)")

    def _stands_out(self, run: Run, runs: list[Run]) -> bool:
        """Whether no other lexeme, anywhere in the grammar, is a text of the run or a prefix of one."""
        others = self._leaves(runs)
        others |= {f"({' '.join(other)})": self.trees_of_runs[other] for other in runs if other != run}
        if len(others) > _MOST_LEAVES:
            return False
        first = frozenset[int]().union(*map(self.terminals.first, others.values()))
        if not first & self.terminals.first(self.trees_of_runs[run]):
            return True
        return not self.terminals.is_possible(f"({' '.join(run)}) & ({either(others)} /(?s:.*)/)")

    def _leaves(self, runs: list[Run]) -> dict[str, Tree]:
        """Return the characters that are read one by one: all that are reachable outside of runs."""
        fields: dict[str, Tree] = {}
        seen, waiting = {"root"}, [self.trees["root"]]
        while waiting:
            tree = waiting.pop()
            match tree:
                case Concatenation():
                    waiting += tree.parts[len(self._run_of(tree, runs)) :]
                case Alternation():
                    waiting += tree.options
                case Repetition():
                    waiting.append(tree.inner)
                case LiteralText():
                    fields |= {literal(one): LiteralText(one) for one in tree.text}
                case CharClass():
                    fields[regex(tree.pattern)] = tree
                case Reference() if tree.name in self.trees and tree.name not in seen:
                    seen.add(tree.name)
                    waiting.append(self.trees[tree.name])
        return fields
