"""A grammar in GBNF as Lark that accepts the same texts.

llguidance cuts a text into lexemes, the longest first. So where a grammar has no recursion it becomes one
lexeme, an expression; and where it has some, every character is a lexeme of its own, as in llama.cpp, but for
the runs that `gbnf_lexemes.py` finds.
"""

from collections.abc import Mapping

from dragoman.constrain.budget import compile_grammar
from dragoman.constrain.grammar.gbnf import (
    Characters,
    Either,
    GbnfError,
    Name,
    Node,
    Repeat,
    Sequence,
    Text,
    Token,
    read,
)
from dragoman.constrain.grammar.gbnf_lexemes import Lexemes, inside
from dragoman.constrain.vocabulary import byte_vocabulary

_MOST_NODES = 50_000


def gbnf_to_lark(grammar: str) -> str:
    """`root ::= "a"*` becomes `start: R0` and `R0: /a/*`."""
    rules = read(grammar)
    ending = _ending(rules, _reached(rules))
    if "root" not in ending:
        raise GbnfError("root leads back to itself in all its options, so no text is ever complete")
    rules = {name: _pruned(rule, ending) for name, rule in rules.items() if name in ending}
    order = _reached(rules)
    regular = _regular(rules, order)
    terminals = {name: f"R{number}" for number, name in enumerate(order) if name in regular}
    lines = [f"{terminals[name]}: {_lark(rules[name], terminals, {})}" for name in order if name in regular]
    if "root" in regular:
        return "\n".join([f"start: {terminals['root']}", *lines])
    used = {name: rules[name] for name in order}
    runs = Lexemes(used, regular, lambda run: _ends_itself(run, terminals, lines)).find()
    lexemes = {run: f"L{number}" for number, run in enumerate(runs)}
    names = {name: f"r{number}" for number, name in enumerate(order)}
    lines += [f"{lexeme}: {_lark(run, terminals, {})}" for run, lexeme in lexemes.items()]
    lines += [f"{names[name]}: {_lark(rules[name], names, lexemes)}" for name in order]
    return "\n".join([f"start: {names['root']}", *lines])


def _ends_itself(run: Node, terminals: Mapping[str, str], lines: list[str]) -> bool:
    """No text of the run with something behind it is a text of the run: their intersection is empty."""
    text = _lark(run, terminals, {})
    both = "\n".join(["start: BOTH", "BOTH: RUN & MORE", f"RUN: {text}", "MORE: RUN /(?s:.)/+", *lines])
    native = compile_grammar(byte_vocabulary(), both)
    if not native.is_error():
        native.compute_bitmask()
    return native.is_error()


def _inside(node: Node) -> list[Node]:
    found = inside(node)
    if len(found) > _MOST_NODES:
        raise GbnfError("the grammar is too large")
    return found


def _reached(rules: Mapping[str, Node]) -> list[str]:
    """The rules that `root` needs, itself first."""
    found = {"root": None}
    waiting = ["root"]
    while waiting:
        for node in _inside(rules[waiting.pop()]):
            if isinstance(node, Name) and node.name not in found:
                found[node.name] = None
                waiting.append(node.name)
    return list(found)


def _ending(rules: Mapping[str, Node], order: list[str]) -> set[str]:
    """The rules that some text is complete for."""
    found: set[str] = set()
    before = -1
    while before < len(found):
        before = len(found)
        found |= {name for name in order if _ends(rules[name], found)}
    return found


def _ends(node: Node, ending: set[str]) -> bool:
    match node:
        case Name(name=name):
            return name in ending
        case Sequence(parts=parts):
            return all(_ends(part, ending) for part in parts)
        case Either(options=options):
            return any(_ends(option, ending) for option in options)
        case Repeat(part=part, least=least):
            return least == 0 or _ends(part, ending)
    return True


def _pruned(node: Node, ending: set[str]) -> Node:
    """Without the options that no text ever completes: an answer that begins one could not go on."""
    match node:
        case Sequence(parts=parts):
            return Sequence(tuple(_pruned(part, ending) for part in parts))
        case Either(options=options):
            return Either(tuple(_pruned(option, ending) for option in options if _ends(option, ending)))
        case Repeat(part=part, least=least, most=most):
            return Repeat(_pruned(part, ending), least, most) if _ends(part, ending) else Text("")
    return node


def _regular(rules: Mapping[str, Node], order: list[str]) -> frozenset[str]:
    """The rules that never lead back to themselves or to a special token."""
    needs = {}
    for name in order:
        nodes = _inside(rules[name])
        if not any(isinstance(node, Token) for node in nodes):
            needs[name] = {node.name for node in nodes if isinstance(node, Name)}
    found: set[str] = set()
    while done := {name for name, names in needs.items() if names <= found} - found:
        found |= done
    return frozenset(found)


def _lark(node: Node, names: Mapping[str, str], lexemes: Mapping[Sequence, str]) -> str:
    match node:
        case Text(text=text):
            return " ".join(f"/{_escaped(character)}/" for character in text) or '""'
        case Characters():
            return f"/{_class(node)}/"
        case Name(name=name):
            return names[name]
        case Token(text=text):
            return text
        case Sequence(parts=parts):
            run = next((run for run in lexemes if parts[: len(run.parts)] == run.parts), None)
            rest = parts[len(run.parts) :] if run else parts
            whole = [f"({_lark(part, names, lexemes)})" for part in rest]
            return " ".join([lexemes[run], *whole] if run else whole) or '""'
        case Either(options=options):
            return " | ".join(f"({_lark(option, names, lexemes)})" for option in options)
        case Repeat(part=part, least=least, most=most):
            return f"({_lark(part, names, lexemes)}){_count(least, most)}"


def _count(least: int, most: int | None) -> str:
    known = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return known.get((least, most)) or f"{{{least},{'' if most is None else most}}}"


def _class(node: Characters) -> str:
    if not node.ranges:
        return "(?s:.)" if node.negated else "[^\\x{0}-\\x{10ffff}]"
    inside = "".join(
        _escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}"
        for first, last in node.ranges
    )
    return f"[{'^' if node.negated else ''}{inside}]"


def _escaped(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"
