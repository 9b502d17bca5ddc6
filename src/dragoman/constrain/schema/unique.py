"""What no grammar can say: the strings of a list are all different. A watch over the JSON as it is written.

The grammar makes sure that the text is JSON of the schema; this only follows where in it the text is, and
remembers the strings of the lists that are marked with `x-unique` (see `rewrites.py`).
"""

import json
from typing import Any

from dragoman.constrain.schema.disjoint import resolved

MARK = "x-unique"
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_MOST_SCHEMAS = 256


class Frame:
    """An object or a list that is open, with the schemas that its value has to be in."""

    __slots__ = ("choices", "index", "is_list", "key", "schemas", "seen", "unique")

    def __init__(self, is_list: bool, schemas: list[Any]) -> None:
        self.is_list = is_list
        self.schemas = schemas
        self.index = 0
        self.key: str | None = None
        self.unique = is_list and any(schema.get(MARK) for schema in schemas)
        self.seen: set[bytes] = set()
        self.choices = _choices(schemas) if self.unique else None

    def copy(self) -> "Frame":
        other = Frame.__new__(Frame)
        for name in Frame.__slots__:
            setattr(other, name, getattr(self, name))
        other.seen = set(self.seen)
        return other


class Watch:
    """One answer's JSON so far. `feed` says whether it is still without a string that comes twice."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.frames: list[Frame] = []
        self.text = bytearray()
        """The string that is open, with its quote and its escapes; empty outside of one."""
        self.escaped = False

    def copy(self) -> "Watch":
        other = Watch(self.root)
        other.frames = [frame.copy() if frame.unique else frame for frame in self.frames[:-1]]
        other.frames += [frame.copy() for frame in self.frames[-1:]]
        other.text, other.escaped = self.text.copy(), self.escaped
        return other

    @property
    def unique(self) -> Frame | None:
        """The list without repetition that the text is directly in."""
        return self.frames[-1] if self.frames and self.frames[-1].unique else None

    def feed(self, piece: bytes) -> bool:
        fine = True
        for byte in piece:
            fine = self._byte(byte) and fine
        return fine

    def _byte(self, byte: int) -> bool:
        if self.text:
            self.text.append(byte)
            if self.escaped or byte == _BACKSLASH:
                self.escaped = not self.escaped
            elif byte == _QUOTE:
                done, self.text = bytes(self.text), bytearray()
                return self._string(done)
            return self._leads_somewhere()
        match chr(byte):
            case '"':
                self.text.append(byte)
            case "{" | "[":
                self._open(byte == ord("["))
            case "}" | "]":
                self.frames.pop()
            case ",":
                self._next()
        return self._leads_somewhere()

    def _open(self, is_list: bool) -> None:
        # A frame below is changed by what is in it, so it must not be shared with a copy.
        self.frames.append(Frame(is_list, self._value_schemas()))

    def _next(self) -> None:
        if self.frames:
            top = self.frames[-1] = self.frames[-1].copy()
            top.index += 1
            top.key = None

    def _string(self, text: bytes) -> bool:
        top = self.frames[-1] if self.frames else None
        if top is None:
            return True
        if top.unique:
            if text in top.seen:
                return False
            top.seen.add(text)
        elif not top.is_list and top.key is None:
            top = self.frames[-1] = top.copy()
            top.key = json.loads(text)
        return True

    def _leads_somewhere(self) -> bool:
        """Of a few strings to choose from, one that is not there yet must still be possible."""
        top = self.unique
        if top is None or top.choices is None or not self.text:
            return True
        begun = bytes(self.text)
        return any(choice.startswith(begun) for choice in top.choices - top.seen)

    def _value_schemas(self) -> list[Any]:
        if not self.frames:
            return _expanded(self.root, [self.root])
        top = self.frames[-1]
        found = [inner for schema in top.schemas for inner in _inside(schema, top)]
        return _expanded(self.root, found)


def _inside(schema: Any, frame: Frame) -> list[Any]:
    """The schemas that a schema has for the value at which the frame is."""
    if frame.is_list:
        first = schema.get("prefixItems", [])
        return [first[frame.index]] if frame.index < len(first) else [schema.get("items", True)]
    named = schema.get("properties", {})
    found = [named[frame.key]] if frame.key in named else [schema.get("additionalProperties", True)]
    return [*found, *schema.get("patternProperties", {}).values()]


def _expanded(root: Any, schemas: list[Any]) -> list[Any]:
    """With all that is referred to, and all alternatives: a list that might be unique is treated as one."""
    found: list[Any] = []
    waiting = list(schemas)
    while waiting and len(found) < _MOST_SCHEMAS:
        schema = waiting.pop()
        if not isinstance(schema, dict) or any(schema is known for known in found):
            continue
        found.append(schema)
        waiting += [*schema.get("anyOf", []), *schema.get("allOf", [])]
        if "$ref" in schema:
            waiting.append(resolved(root, schema["$ref"]))
    return found


def _choices(schemas: list[Any]) -> frozenset[bytes] | None:
    """The strings that may be in the list, if there are only a few."""
    for schema in schemas:
        values = schema.get(MARK)
        if isinstance(values, list):
            return frozenset(json.dumps(value, ensure_ascii=False).encode() for value in values)
    return None
