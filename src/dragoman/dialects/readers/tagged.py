"""A name and then arguments between tags, or in a tree of tags. Their types are in the tool's schema."""

import re
from functools import lru_cache
from html import unescape
from typing import TYPE_CHECKING

from msgspec import Struct, field

from dragoman.dialects.compiled import marks_of, variants
from dragoman.dialects.declare import AttributedCalls, DoubledCalls, Spellings, TaggedCalls, TreeCalls
from dragoman.dialects.scan import Marks, Wait, structure_of
from dragoman.dialects.schema import ArgumentPlace, quote_json

if TYPE_CHECKING:
    from dragoman.dialects.machine import Machine

# Lone surrogates stand for special tokens, and none of them is part of a name.
NAME = re.compile("\\s*[^\\s<>{}\\[\\]\ud800-\udfff]*\\s*")
ATTRIBUTE = re.compile("[^\\s<>\ud800-\udfff]*")
KEY = re.compile(r"[^<>\n]*")
REST = re.compile(r"[^<>\n]*")
CDATA, CDATA_END = Marks(("<![CDATA[",)), Marks(("]]>",))


def read_tagged_call(m: "Machine", shape: TaggedCalls) -> Wait[bool]:
    reader = TagReader(m, shape)
    if not (yield from reader.head()):
        return False
    return (yield from reader.body())


class TagReader:
    def __init__(self, machine: "Machine", shape: TaggedCalls) -> None:
        self.m = machine
        self.shape = shape
        self.attributes = shape.rest if isinstance(shape, AttributedCalls) else ""
        self.place = ArgumentPlace(None, {})
        self.lead = "{"
        self.closed = False
        self.keys = marks_of(shape.key)
        self.closes = marks_of(shape.close)
        self.goes_on = marks_of(shape.key, shape.close, shape.section.close if shape.section else ())

    def head(self) -> Wait[bool]:
        """The name. What ends it may already be the first argument, or the end."""
        m, shape = self.m, self.shape
        quote = shape.then[0].startswith('"')
        ends = marks_of(shape.then, shape.empty, shape.key, shape.close)
        if self.attributes:
            ends = marks_of((self.attributes[0],))
        name, found = yield from m.collect(ends, ATTRIBUTE if quote or self.attributes else NAME)
        if not found:
            return False
        if self.attributes:
            _, found = yield from m.collect(marks_of(shape.then), REST)
            if not found:
                return False
        if found in self.keys.all or found in self.closes.all:
            m.at -= len(found)
        self.closed = found in shape.empty
        name = self._read_name(name if quote else name.strip())
        if (not name and not quote) or not (yield from self._goes_on()):
            return False
        m.open_call(name, None, shape)
        self.place = m.tools.arguments(name)
        return True

    def _goes_on(self) -> Wait[bool]:
        """Whether what follows the name belongs to a call: else it was a tag that prose quotes."""
        if self.closed:
            return True
        following = yield from self.m.space()
        if (yield from self.m.stands(self.goes_on)) or (self.shape.json_body and following == "{"):
            return True
        return not self.attributes and self._cut_short()

    def _cut_short(self) -> bool:
        """The text ended here, or within the next tag."""
        m = self.m
        return m.ended and any(mark.startswith(m.text[m.at :]) for mark in self.goes_on.all)

    def _read_name(self, name: str) -> str:
        if self.attributes:
            name = unescape(name)
        half, dot, other = name.partition(".")
        doubled = isinstance(self.shape, DoubledCalls) and dot and half == other
        return half if doubled and half in self.m.tools and name not in self.m.tools else name

    def body(self) -> Wait[bool]:
        m, shape = self.m, self.shape
        if shape.json_body and not self.closed and (yield from m.space()) == "{":
            structure = structure_of(tuple(self.closes.all))
            yield from m.json_container(m.arguments, structure, self.closes)
            self.lead = ""
        while not self.closed:
            yield from m.space()
            if (yield from m.stands(self.closes)):
                break
            found = yield from m.match(self.keys)
            if not found:
                # The end, or something that is no argument: the call is over, and complete enough
                # only if nothing but its own closing is missing.
                if not self._cut_short():
                    break
                return self._cut_off()
            yield from m.skip(_trail(shape.key, found))
            if not (yield from self._argument()):
                return False
        self._finish()
        return True

    def _cut_off(self) -> bool:
        """The text ended between two arguments: what there is stays as it is, and half a tag is no text."""
        self.m.at = len(self.m.text)
        if not self.shape.open_end:
            return self._break_off()
        self._finish()
        return True

    def _break_off(self) -> bool:
        """A key that does not end: nothing is said of it."""
        if self.lead == "{":
            self.m.arguments("{")
        return False

    def _without_value(self) -> bool:
        """A key without a value is dropped; if it is the end that cut it off, so is half a tag."""
        m = self.m
        if not m.ended or not self.shape.value.startswith(m.text[m.at :]):
            return True
        m.at = len(m.text)
        return self._break_off()

    def _finish(self) -> None:
        if self.lead:
            self.m.arguments("{}" if self.lead == "{" else "}")
        self.m.close_call()

    def _argument(self) -> Wait[bool]:
        m, shape = self.m, self.shape
        key, found = yield from m.collect(_marks_before(shape.key_end), KEY)
        if not found:
            return self._break_off()
        stated = ""
        if shape.type_end and found not in shape.type_end:
            stated, found = yield from m.collect(marks_of(shape.type_end), ATTRIBUTE)
            if not found:
                return self._break_off()
        yield from m.skip(_trail(shape.type_end or shape.key_end, found))
        if shape.value.strip():
            yield from m.space()
            if not (yield from m.match(marks_of((shape.value,)))):
                return self._without_value()
        yield from m.skip(shape.value[len(shape.value.rstrip()) :])
        key = unescape(key) if self.attributes else key
        m.arguments(f"{self.lead}{quote_json(key)}: ")
        self.lead = ", "
        return (yield from self._value(self.place.member(key), stated))

    def _value(self, place: ArgumentPlace, stated: str) -> Wait[bool]:
        m, shape = self.m, self.shape
        text = self._is_text(place, stated)
        if shape.cdata and (yield from m.match(CDATA)):
            return (yield from self._cdata(place, text))
        if text:
            m.arguments('"')
            complete = yield from self._until_end(True, [])
            if complete:
                m.arguments('"')
            return complete
        parts: list[str] = []
        complete = yield from self._until_end(False, parts)
        if complete:
            m.arguments(place.json("".join(parts), shape.untyped))
        else:
            m.arguments("".join(parts).strip())
        return complete

    def _is_text(self, place: ArgumentPlace, stated: str) -> bool:
        """Known to be a string before it is read, so that it can be said as it comes."""
        if stated:
            return stated == ("true" if self.shape.types == "string" else "string")
        return place.is_text or (not place.types and self.shape.untyped == "text")

    def _until_end(self, text: bool, parts: list[str]) -> Wait[bool]:
        """Up to the closing tag. One that neither an argument nor the end of the call follows is text."""
        m = self.m
        sink = m.string_arguments if text else parts.append
        ends = _marks_before(self.shape.value_end)
        while True:
            found = yield from m.until(ends, sink)
            if not found:
                return False
            mark, space = found, ""
            while (following := (yield from m.peek())).isspace():
                space += following
                m.at += 1
            if not following or (yield from m.stands(self.goes_on)) or self._cut_short():
                return True
            sink(mark + space)

    def _cdata(self, place: ArgumentPlace, text: bool) -> Wait[bool]:
        m, parts = self.m, list[str]()
        m.arguments('"' if text else "")
        if not (yield from m.until(CDATA_END, m.string_arguments if text else parts.append)):
            m.arguments("".join(parts).strip())
            return False
        m.arguments('"' if text else place.json("".join(parts), self.shape.untyped))
        yield from m.space()
        yield from m.match(marks_of(self.shape.value_end))
        return True


@lru_cache(maxsize=1024)
def _trail(spellings: Spellings, found: str) -> str:
    """The layout that belongs after a marker."""
    return variants(spellings).get(found, ("", ""))[1]


@lru_cache(maxsize=1024)
def _marks_before(spellings: Spellings) -> Marks:
    """Markers together with the layout before them, which is no part of what they end."""
    return Marks(variants(spellings))


# A tree of tags: `<tags><item>a</item></tags>`, each tag after a marker of its own

TAG_NAME = re.compile(r"[^\s<>]*")
TAG = re.compile(r"<?/?[^<>]*")
TAG_END = Marks((">",))
ITEM = "item"
MOST_LEVELS = 128


class TagNode(Struct):
    tag: str
    texts: list[str] = field(default_factory=list)
    children: list["TagNode"] = field(default_factory=list)


def read_tree_call(m: "Machine", shape: TreeCalls) -> Wait[bool]:
    """The whole tree is read before anything is said: a wrong closing tag makes all of it text."""
    name, found = yield from m.collect(marks_of(shape.then), TAG_NAME)
    if not found:
        return False
    root = yield from _tree(m, shape, TagNode(name))
    if root is None:
        return False
    m.open_call(name, None, shape)
    m.arguments(_tree_object(root, m.tools.arguments(name)))
    m.close_call()
    return True


def _tree(m: "Machine", shape: TreeCalls, root: TagNode) -> Wait[TagNode | None]:
    """Everything up to the closing tag of the call, which is left to be read."""
    path, lead = [root], Marks((shape.lead,))
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
            path.append(TagNode(tag[1:]))
            path[-2].children.append(path[-1])
        elif len(path) > 1 and tag[2:] == path[-1].tag:
            path.pop()
        else:
            return None
    return None


def _tree_object(node: TagNode, place: ArgumentPlace) -> str:
    members = (
        f"{quote_json(child.tag)}: {_tree_value(child, place.member(child.tag))}" for child in node.children
    )
    return "{" + ", ".join(members) + "}"


def _tree_value(node: TagNode, place: ArgumentPlace) -> str:
    if not node.children:
        text = "".join(node.texts)
        empty = {"array": "[]", "object": "{}"} if not text.strip() else {}
        return next((empty[kind] for kind in place.types if kind in empty), None) or place.json(text)
    listed = all(child.tag == ITEM for child in node.children) and not place.has(ITEM)
    if listed and place.types != {"object"}:
        return "[" + ", ".join(_tree_value(child, place.item()) for child in node.children) + "]"
    return _tree_object(node, place)
