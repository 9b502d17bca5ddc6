"""`uniqueItems`: what no grammar can express, checked while the JSON is written.

The grammar ensures that the text is JSON of the schema; this only tracks the position in it, and remembers
the strings of the lists that are marked with `x-unique` (see `rewrites.py`).
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from dragoman.constrain.vocabulary import GrammarMatcher, Vocabulary
from dragoman.dialects.schema import resolve
from dragoman.errors import ConstraintFailed

MARK = "x-unique"
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_MOST_SCHEMAS = 256


class OpenValue:
    """An open object or list, with the schemas that apply to its value."""

    __slots__ = ("choices", "index", "is_list", "key", "schemas", "seen", "unique")

    def __init__(self, is_list: bool, schemas: list[Any]) -> None:
        self.is_list = is_list
        self.schemas = schemas
        self.index = 0
        self.key: str | None = None
        self.unique = is_list and any(schema.get(MARK) for schema in schemas)
        self.seen: set[bytes] = set()
        self.choices = _choices(schemas) if self.unique else None

    def copy(self) -> "OpenValue":
        other = OpenValue.__new__(OpenValue)
        for name in OpenValue.__slots__:
            setattr(other, name, getattr(self, name))
        other.seen = set(self.seen)
        return other


class UniqueItemsTracker:
    """State of one answer's JSON. `feed` returns whether no string was repeated so far."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.frames: list[OpenValue] = []
        self.text = bytearray()
        """The open string, with its quote and escapes; empty outside of one."""
        self.escaped = False

    def copy(self) -> "UniqueItemsTracker":
        other = UniqueItemsTracker(self.root)
        other.frames = [frame.copy() if frame.unique else frame for frame in self.frames[:-1]]
        other.frames += [frame.copy() for frame in self.frames[-1:]]
        other.text, other.escaped = self.text.copy(), self.escaped
        return other

    @property
    def unique(self) -> OpenValue | None:
        """The innermost list, if it must not have duplicates."""
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
                # A lower frame is changed by what is in it, so it must not be shared with a copy.
                self.frames.append(OpenValue(byte == ord("["), self._value_schemas()))
            case "}" | "]":
                self.frames.pop()
            case ",":
                self._next()
        return self._leads_somewhere()

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
        """Whether, in a list with few allowed strings, an unused one is still possible."""
        top = self.unique
        if top is None or top.choices is None or not self.text:
            return True
        begun = bytes(self.text)
        return any(choice.startswith(begun) for choice in top.choices - top.seen)

    def _value_schemas(self) -> list[Any]:
        if not self.frames:
            return _expand(self.root, [self.root])
        top = self.frames[-1]
        items = [inner for schema in top.schemas for inner in _inside(schema, top)]
        return _expand(self.root, items)


def _inside(schema: Any, frame: OpenValue) -> list[Any]:
    """Return the schemas for the value at the frame's position."""
    if frame.is_list:
        first = schema.get("prefixItems", [])
        return [first[frame.index]] if frame.index < len(first) else [schema.get("items", True)]
    named = schema.get("properties", {})
    items = [named[frame.key]] if frame.key in named else [schema.get("additionalProperties", True)]
    return [*items, *schema.get("patternProperties", {}).values()]


def _expand(root: Any, schemas: list[Any]) -> list[Any]:
    """Add all references and alternatives: a list that might be unique is treated as one."""
    items: list[Any] = []
    waiting = list(schemas)
    while waiting and len(items) < _MOST_SCHEMAS:
        schema = waiting.pop()
        if not isinstance(schema, dict) or any(schema is expanded for expanded in items):
            continue
        items.append(schema)
        waiting += [*schema.get("anyOf", []), *schema.get("allOf", [])]
        if "$ref" in schema:
            waiting.append(resolve(root, schema["$ref"]))
    return items


def _choices(schemas: list[Any]) -> frozenset[bytes] | None:
    """Return the strings allowed in the list, if they are listed."""
    for schema in schemas:
        values = schema.get(MARK)
        if isinstance(values, list):
            return frozenset(json.dumps(value, ensure_ascii=False).encode() for value in values)
    return None


_MOST_TRIED = 4096


class UniqueItemsMatcher(GrammarMatcher):
    def __init__(self, vocabulary: Vocabulary, native: LLMatcher, watch: UniqueItemsTracker) -> None:
        super().__init__(vocabulary, native)
        self._watch = watch
        self._pieces = SortedVocabulary.of(vocabulary)

    def mask(self, row: NDArray[np.float32]) -> None:
        super().mask(row)
        forbidden = self._find_forbidden(row)
        if forbidden:
            row[forbidden] = -np.inf
            if not (row > -np.inf).any():
                raise self._fail("The constraint of this answer allows no further token.")

    def accept(self, id_: int) -> None:
        super().accept(id_)
        if not self._watch.feed(self._pieces.of_id(id_)):
            raise self._fail("A list with uniqueItems must not repeat a string.")

    def copy(self) -> "UniqueItemsMatcher":
        other = UniqueItemsMatcher(self.vocabulary, self._native.deep_copy(), self._watch.copy())
        other._ended, other._refused = self._ended, self._refused
        return other

    def _fail(self, message: str) -> ConstraintFailed:
        self._refused = message
        return ConstraintFailed(message)

    def _find_forbidden(self, row: NDArray[np.float32]) -> list[int]:
        """Return the ids that would complete a repeated string; some of them may be forbidden already."""
        open_list = self._watch.unique
        if open_list is None:
            return self._failing(self._pieces.with_quotes(4), row)
        if open_list.choices is not None:
            return self._failing(np.flatnonzero(row > -np.inf).tolist(), row)
        begun = bytes(self._watch.text)
        ends = [text[len(begun) :] for text in open_list.seen if text.startswith(begun)]
        numbers = [id_ for end in ends for id_ in self._pieces.beginning_with(end)]
        # Tokens that contain a whole string, or end one and contain another: there are few, so they are
        # tried.
        return numbers + self._failing(self._pieces.with_quotes(3 if begun else 2), row)

    def _failing(self, ids: Sequence[int], row: NDArray[np.float32]) -> list[int]:
        tried = [id_ for id_ in ids if id_ < len(row) and row[id_] > -np.inf]
        if len(tried) > _MOST_TRIED:
            raise self._fail("The constraint of this answer took too long for one step.")
        return [id_ for id_ in tried if not self._watch.copy().feed(self._pieces.of_id(id_))]


class SortedVocabulary:
    """Bytes of a vocabulary's ids in sorted order, so that those with a common prefix are found at once."""

    _made: ClassVar["WeakKeyDictionary[Vocabulary, SortedVocabulary]"] = WeakKeyDictionary()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._texts = vocabulary.texts
        self._order = sorted(range(len(self._texts)), key=self._texts.__getitem__)
        self._sorted = [self._texts[id_] for id_ in self._order]
        quotes = [text.count(b'"') for text in self._texts]
        self._several = {least: [id_ for id_, n in enumerate(quotes) if n >= least] for least in (2, 3, 4)}

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> "SortedVocabulary":
        if vocabulary not in cls._made:
            cls._made[vocabulary] = cls(vocabulary)
        return cls._made[vocabulary]

    def of_id(self, id_: int) -> bytes:
        return self._texts[id_] if 0 <= id_ < len(self._texts) else b""

    def beginning_with(self, start: bytes) -> list[int]:
        first = bisect_left(self._sorted, start)
        # The first text after all with this prefix: 0xff never occurs in UTF-8.
        last = bisect_left(self._sorted, start + b"\xff" * 8, lo=first)
        return self._order[first:last]

    def with_quotes(self, least: int) -> list[int]:
        return self._several[least]
