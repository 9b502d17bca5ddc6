"""Arguments as a tree of tags: `<tags><item>a</item></tags>`, each tag after a marker of its own."""

import re
from typing import TYPE_CHECKING

from msgspec import Struct, field

from dragoman.dialects.compiled import marks_of
from dragoman.dialects.declare import TaggedCalls
from dragoman.dialects.scan import Marks, Wait
from dragoman.dialects.schema import Place, quoted

if TYPE_CHECKING:
    from dragoman.dialects.machine import Machine

NAME = re.compile(r"[^\s<>]*")
TAG = re.compile(r"<?/?[^<>]*")
TAG_END = Marks((">",))
ITEM = "item"
MOST_LEVELS = 128


class Node(Struct):
    tag: str
    texts: list[str] = field(default_factory=list)
    children: list["Node"] = field(default_factory=list)


def read_nested_call(m: "Machine", shape: TaggedCalls) -> Wait[bool]:
    """The whole tree is read before anything is said: a wrong closing tag makes all of it text."""
    name, found = yield from m.collect(marks_of(shape.then), NAME)
    if not found:
        return False
    root = yield from _tree(m, shape, Node(name))
    if root is None:
        return False
    m.open_call(name, None, shape)
    m.arguments(_object(root, m.tools.arguments(name)))
    m.close_call()
    return True


def _tree(m: "Machine", shape: TaggedCalls, root: Node) -> Wait[Node | None]:
    """Everything up to the closing tag of the call, which is left to be read."""
    path, lead = [root], Marks((shape.nested,))
    while len(path) <= MOST_LEVELS:
        if len(path) == 1:
            yield from m.space()
            if (yield from m.stands(marks_of(shape.close))):
                return root
        if not (yield from m.until(lead, path[-1].texts.append)):
            return None
        tag, found = yield from m.collect(TAG_END, TAG)
        if not found or not tag.startswith("<"):
            return None
        if not tag.startswith("</"):
            path.append(Node(tag[1:]))
            path[-2].children.append(path[-1])
        elif len(path) > 1 and tag[2:] == path[-1].tag:
            path.pop()
        else:
            return None
    return None


def _object(node: Node, place: Place) -> str:
    members = (f"{quoted(child.tag)}: {_value(child, place.member(child.tag))}" for child in node.children)
    return "{" + ", ".join(members) + "}"


def _value(node: Node, place: Place) -> str:
    if not node.children:
        text = "".join(node.texts)
        empty = {"array": "[]", "object": "{}"} if not text.strip() else {}
        return next((empty[kind] for kind in place.types if kind in empty), None) or place.json(text)
    listed = all(child.tag == ITEM for child in node.children) and not place.has(ITEM)
    if listed and place.types != {"object"}:
        return "[" + ", ".join(_value(child, place.item()) for child in node.children) + "]"
    return _object(node, place)
