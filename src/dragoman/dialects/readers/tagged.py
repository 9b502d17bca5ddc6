"""Calls with a name and arguments in tags, or in a tree of tags. Argument types come
from the tool's schema.
"""

import re
from functools import lru_cache
from html import unescape
from typing import TYPE_CHECKING

from msgspec import Struct, field

from dragoman.dialects.declarations import AttributedCalls, DoubledCalls, Spellings, TaggedCalls, TreeCalls
from dragoman.dialects.marker_tables import marks_of, variants
from dragoman.dialects.scan import MarkerSet, Wait, structure_of
from dragoman.dialects.schema import ArgumentSchema, escape_json, quote_json

if TYPE_CHECKING:
    from dragoman.dialects.state_machine import AnswerStateMachine

# Lone surrogates stand for special tokens and are never part of a name.
NAME = re.compile("\\s*[^\\s<>{}\\[\\]\ud800-\udfff]*\\s*")
ATTRIBUTE = re.compile("[^\\s<>\ud800-\udfff]*")
QUOTED = re.compile('(?:[^\\s"\ud800-\udfff][^"\\n\ud800-\udfff]*)?')
"""A quoted name may contain anything else."""
KEY = re.compile("[^<>\\n\ud800-\udfff]*")
KEY_LIKE = re.compile(r"[\w.\-]+")
REST = re.compile("[^<>\\n\ud800-\udfff]*")
INDEX = re.compile(r'\s*(?:i(?:n(?:d(?:e(?:x(?:=(?:"\d*"?)?)?)?)?)?)?)?\s*', re.ASCII)
"""The rest of a name's tag, or a prefix of it. Anything else there is text."""
TYPES = {
    "string": ("true", "false"),
    "name": ("string", "number", "integer", "boolean", "object", "array", "null"),
}
TAGS = ("<", *map(chr, range(0xD800, 0xE000)))
"""First characters of markers that cannot occur in a value; lone surrogates are special tokens."""
CDATA, CDATA_END = MarkerSet(("<![CDATA[",)), MarkerSet(("]]>",))


def read_tagged_call(m: "AnswerStateMachine", shape: TaggedCalls) -> Wait[bool]:
    reader = TagReader(m, shape)
    if not (yield from reader.head()):
        return False
    return (yield from reader.body())


class TagReader:
    def __init__(self, machine: "AnswerStateMachine", shape: TaggedCalls) -> None:
        self.m = machine
        self.shape = shape
        self.attributes = shape.rest if isinstance(shape, AttributedCalls) else ""
        self.argument_schema = ArgumentSchema(None, {})
        self.given: set[str] = set()
        """Keys read so far."""
        self.ahead: tuple[str, str] | None = None
        """A key that came before the previous value was closed, and the marker after it."""
        self.lead = "{"
        self.closed = False
        self.keys = marks_of(shape.key)
        self.closes = marks_of(shape.close)
        self.ends = _ends_of_value(shape)
        self.goes_on = marks_of(shape.key, shape.close, shape.section.close if shape.section else ())

    def head(self) -> Wait[bool]:
        """Read the name. It may be ended by the first argument or by the end of the call."""
        m, shape = self.m, self.shape
        quote = shape.then[0].startswith('"')
        ends = marks_of(shape.then, shape.empty, shape.key, shape.close)
        if self.attributes:
            ends = marks_of((self.attributes[0],))
        plausible = QUOTED if self.attributes else ATTRIBUTE if quote else NAME
        name, text = yield from m.collect(ends, plausible)
        if not text:
            return False
        rest = ""
        if self.attributes:
            rest, text = yield from m.collect(marks_of(shape.then), REST)
            if not text:
                return False
        if text in self.keys.all or text in self.closes.all:
            m.at -= len(text)
        self.closed = text in shape.empty
        name = self._read_name(name if quote else name.strip())
        if not name or not (yield from self._goes_on()):
            return False
        m.open_call(name, None, shape)
        self.argument_schema = m.tools.arguments(name)
        m.set_aside("" if INDEX.fullmatch(rest) else rest)
        return True

    def _goes_on(self) -> Wait[bool]:
        """Whether the text after the name belongs to a call; if not, prose quotes a tag."""
        if self.closed:
            return True
        following = yield from self.m.space()
        if (yield from self.m.peek_marker(self.goes_on)) or (self.shape.json_body and following == "{"):
            return True
        return not self.attributes and self._cut_short()

    def _cut_short(self) -> bool:
        """Whether the text ends here or within the next tag."""
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
            if self.ahead is not None:
                if not (yield from self._argument("")):
                    return False
                continue
            yield from m.space()
            if (yield from m.peek_marker(self.closes)):
                break
            text = yield from m.match(self.keys)
            if not text:
                # The end, or text that is not an argument: the call is over. It is complete only if nothing
                # but its own closing marker is missing.
                if not self._cut_short():
                    break
                return self._cut_off()
            yield from m.skip(_trail(shape.key, text))
            if not (yield from self._argument(text)):
                return False
        self._finish()
        return True

    def _cut_off(self) -> bool:
        """The text ended between two arguments: keep them unchanged and drop the incomplete tag."""
        self.m.at = len(self.m.text)
        if not self.shape.open_end:
            return self._break_off()
        self._finish()
        return True

    def _break_off(self, tag: str = "", key: str | None = None) -> bool:
        """Handle a key without a value. At the end of the text the arguments end with it; otherwise the tag
        is text.
        """
        m = self.m
        if key is not None and m.ended and m.at == len(m.text):
            m.arguments(f'{self.lead}"{escape_json(key)}')
            return False
        if self.lead == "{":
            m.arguments("{")
        m.set_aside(tag)
        return False

    def _without_value(self, key: str) -> bool:
        """Set aside a key without a value: it is not an argument. At the end of the text an incomplete tag is
        dropped.
        """
        m = self.m
        if m.ended and self.shape.value.startswith(m.text[m.at :]):
            m.at = len(m.text)
            return self._break_off(key=key)
        m.set_aside(key)
        return True

    def _finish(self) -> None:
        if self.lead:
            self.m.arguments("{}" if self.lead == "{" else "}")
        self.m.close_call()

    def _argument(self, tag: str) -> Wait[bool]:
        m, shape = self.m, self.shape
        if self.ahead is None:
            key, text = yield from m.collect(_marks_before(shape.key_end), KEY)
        else:
            (key, text), self.ahead = self.ahead, None
        if not text:
            return self._break_off(tag + key, key)
        tag += key + text
        stated = ""
        if shape.type_end and text not in shape.type_end:
            stated, text = yield from m.collect(marks_of(shape.type_end), _type_names(shape.types))
            if not text:
                return self._break_off(tag + stated, key)
        yield from m.skip(_trail(shape.type_end or shape.key_end, text))
        key = unescape(key) if self.attributes else key
        if shape.value.strip():
            yield from m.space()
            if not (yield from m.match(marks_of((shape.value,)))):
                return self._without_value(key)
        yield from m.skip(shape.value[len(shape.value.rstrip()) :])
        m.arguments(f"{self.lead}{quote_json(key)}: ")
        self.lead = ", "
        self.given.add(key)
        return (yield from self._value(self.argument_schema.member(key), stated))

    def _value(self, schema: ArgumentSchema, stated: str) -> Wait[bool]:
        m, shape = self.m, self.shape
        text = self._is_text(schema, stated)
        if shape.cdata and (yield from m.match(CDATA)):
            return (yield from self._cdata(schema, text))
        if text:
            m.arguments('"')
            complete = yield from self._until_end(True, [])
            if complete:
                m.arguments('"')
            return complete
        parts: list[str] = []
        complete = yield from self._until_end(False, parts)
        if complete:
            m.arguments(schema.json("".join(parts), shape.untyped))
        else:
            m.arguments("".join(parts).strip())
        return complete

    def _is_text(self, schema: ArgumentSchema, stated: str) -> bool:
        """Whether the value is certainly a string, so that it can be emitted as it comes."""
        if stated:
            return stated == ("true" if self.shape.types == "string" else "string")
        return schema.is_text or (not schema.types and self.shape.untyped == "text")

    def _until_end(self, text: bool, parts: list[str]) -> Wait[bool]:
        """Read a value up to its closing tag. A closing tag that neither an argument nor the end of the call
        follows is part of the value.
        """
        m = self.m
        sink = m.string_arguments if text else parts.append
        ends, keys, closes = self.ends
        while True:
            value = yield from m.until(ends, sink)
            if not value:
                return False
            if value in keys:
                read = yield from self._next_key(value)
            elif value in closes:
                read = yield from self._end_of_all(value)
            else:
                read = value + (yield from m.blank())
                if not (yield from m.peek()) or (yield from m.peek_marker(self.goes_on)) or self._cut_short():
                    return True
            if not read:
                return True
            sink(read)

    def _next_key(self, tag: str) -> Wait[str]:
        """Read a key where the closing tag of the value is missing. Return the text
        read if it is not a key.
        """
        key, text = yield from self.m.collect(_marks_before(self.shape.key_end), KEY)
        name = unescape(key) if self.attributes else key
        if not text or name in self.given or not self._expects(name, tag):
            return tag + key + text
        self.ahead = key, text
        return ""

    def _expects(self, key: str, tag: str) -> bool:
        """Whether the tool has such an argument. Without a schema, a key at the
        beginning of a line counts.
        """
        if self.argument_schema.has_properties:
            return self.argument_schema.has(key)
        return tag.startswith("\n") and KEY_LIKE.fullmatch(key) is not None

    def _end_of_all(self, close: str) -> Wait[str]:
        """Read the end of the call where the value's closing tag is missing: it must end the answer. Return
        the text read if it does not.
        """
        m, section = self.m, self.shape.section
        read = close + (yield from m.blank())
        if section is not None:
            read += yield from m.match(marks_of(section.close))
            read += yield from m.blank()
        self.closed = not (yield from m.peek())
        return "" if self.closed else read

    def _cdata(self, schema: ArgumentSchema, text: bool) -> Wait[bool]:
        m, parts = self.m, list[str]()
        m.arguments('"' if text else "")
        if not (yield from m.until(CDATA_END, m.string_arguments if text else parts.append)):
            m.arguments("".join(parts).strip())
            return False
        m.arguments('"' if text else schema.json("".join(parts), self.shape.untyped))
        yield from m.space()
        yield from m.match(marks_of(self.shape.value_end))
        return True


@lru_cache(maxsize=1024)
def _trail(spellings: Spellings, text: str) -> str:
    """Return the layout that belongs after a marker."""
    return variants(spellings).get(text, ("", ""))[1]


@lru_cache(maxsize=1024)
def _marks_before(spellings: Spellings) -> MarkerSet:
    """Return markers with the layout before them, which is not part of the text they end."""
    return MarkerSet(variants(spellings))


@lru_cache(maxsize=1024)
def _type_names(types: str) -> re.Pattern[str]:
    """Return a pattern of the type names and all their prefixes."""
    beginnings = {name[:size] for name in TYPES[types] for size in range(len(name) + 1)}
    return re.compile("|".join(sorted(beginnings, key=len, reverse=True)))


@lru_cache(maxsize=1024)
def _ends_of_value(shape: TaggedCalls) -> tuple[MarkerSet, frozenset[str], frozenset[str]]:
    """Return all markers that may end a value; among them the keys and call ends, if the value's own end is
    missing.
    """
    end = shape.value_end[0]
    # If it is missing, the whitespace around it still does not belong to the value.
    layout = end[: len(end) - len(end.lstrip())] or end[len(end.rstrip()) :]
    tags = TAGS if end.strip() else ()
    ends = variants(shape.value_end)
    keys, closes = (
        frozenset(variants(layout + mark.strip() for mark in marks if mark.startswith(tags))).difference(ends)
        for marks in (shape.key, shape.close)
    )
    return MarkerSet({*ends, *keys, *closes}), keys, closes


# A tree of tags: `<tags><item>a</item></tags>`, each tag after a marker

TAG_NAME = re.compile(r"[^\s<>]*")
TAG = re.compile(r"<?/?[^<>]*")
TAG_END = MarkerSet((">",))
ITEM = "item"
MOST_LEVELS = 128


class TagNode(Struct):
    tag: str
    texts: list[str] = field(default_factory=list)
    children: list["TagNode"] = field(default_factory=list)


def read_tree_call(m: "AnswerStateMachine", shape: TreeCalls) -> Wait[bool]:
    """Read the whole tree before anything is emitted: a wrong closing tag makes all of it text."""
    name, text = yield from m.collect(marks_of(shape.then), TAG_NAME)
    if not text or not name:
        return False
    root = yield from _tree(m, shape, TagNode(name))
    if root is None:
        return False
    m.open_call(name, None, shape)
    m.arguments(_tree_object(root, m.tools.arguments(name)))
    m.close_call()
    return True


def _tree(m: "AnswerStateMachine", shape: TreeCalls, root: TagNode) -> Wait[TagNode | None]:
    """Read everything up to the closing tag of the call, which is not consumed."""
    path, lead = [root], MarkerSet((shape.lead,))
    while len(path) <= MOST_LEVELS:
        if len(path) == 1:
            yield from m.space()
            if (yield from m.peek_marker(marks_of(shape.close))):
                return root
        if not (yield from m.until(lead, path[-1].texts.append)):
            return None
        tag, text = yield from m.collect(TAG_END, TAG)
        if not text or not tag.startswith("<"):
            return None
        if path[-1].children or not tag.startswith("</"):
            # An argument cannot hold text beside tags.
            if any(map(str.strip, path[-1].texts)):
                return None
            path[-1].texts.clear()
        if not tag.startswith("</"):
            path.append(TagNode(tag[1:]))
            path[-2].children.append(path[-1])
        elif len(path) > 1 and tag[2:] == path[-1].tag:
            path.pop()
        else:
            return None
    return None


def _tree_object(node: TagNode, schema: ArgumentSchema) -> str:
    members = (
        f"{quote_json(child.tag)}: {_tree_value(child, schema.member(child.tag))}" for child in node.children
    )
    return "{" + ", ".join(members) + "}"


def _tree_value(node: TagNode, schema: ArgumentSchema) -> str:
    if not node.children:
        text = "".join(node.texts)
        empty = {"array": "[]", "object": "{}"} if not text.strip() else {}
        return next((empty[kind] for kind in schema.types if kind in empty), None) or schema.json(text)
    listed = all(child.tag == ITEM for child in node.children) and not schema.has(ITEM)
    if listed and schema.types != {"object"}:
        return "[" + ", ".join(_tree_value(child, schema.item()) for child in node.children) + "]"
    return _tree_object(node, schema)
