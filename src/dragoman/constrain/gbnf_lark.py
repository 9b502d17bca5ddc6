"""A grammar in GBNF as Lark that accepts the same texts.

llguidance cuts a text into lexemes, the longest first. So where a grammar has no recursion it becomes one
lexeme, an expression; and where it has some, every character is a lexeme of its own, as in llama.cpp.
"""

from collections.abc import Mapping

from dragoman.constrain.gbnf import (
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

_MOST_NODES = 50_000


def gbnf_to_lark(grammar: str) -> str:
    """`root ::= "a"*` becomes `start: R0` and `R0: /a/*`."""
    rules = read(grammar)
    order = _reached(rules)
    if "root" not in _ending(rules, order):
        raise GbnfError("root leads back to itself in all its options, so no text is ever complete")
    regular = _is_regular(rules, order)
    names = {name: f"R{number}" if regular else f"r{number}" for number, name in enumerate(order)}
    lines = [f"start: {names['root']}"]
    lines += [f"{names[name]}: {_lark(rules[name], names)}" for name in order]
    return "\n".join(lines)


def _children(node: Node) -> tuple[Node, ...]:
    match node:
        case Sequence(parts=inside) | Either(options=inside):
            return inside
        case Repeat(part=part):
            return (part,)
    return ()


def _inside(node: Node) -> list[Node]:
    found = [node]
    for one in found:
        found += _children(one)
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


def _is_regular(rules: Mapping[str, Node], order: list[str]) -> bool:
    """No rule leads back to itself, and there are no special tokens."""
    needs = {}
    for name in order:
        nodes = _inside(rules[name])
        if any(isinstance(node, Token) for node in nodes):
            return False
        needs[name] = {node.name for node in nodes if isinstance(node, Name)}
    while needs:
        done = [name for name, names in needs.items() if not names]
        if not done:
            return False
        needs = {name: names - set(done) for name, names in needs.items() if name not in done}
    return True


def _lark(node: Node, names: Mapping[str, str]) -> str:
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
            return " ".join(f"({_lark(part, names)})" for part in parts) or '""'
        case Either(options=options):
            return " | ".join(f"({_lark(option, names)})" for option in options)
        case Repeat(part=part, least=least, most=most):
            return f"({_lark(part, names)}){_count(least, most)}"


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
