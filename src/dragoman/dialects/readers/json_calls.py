"""Calls with JSON arguments: `{"name": "f", "arguments": {...}}`, or a name followed by an object."""

import json
import re
from typing import TYPE_CHECKING

from dragoman.dialects.declarations import (
    ActionCalls,
    JsonCalls,
    KeyedCalls,
    NamedCalls,
    PythonObjects,
)
from dragoman.dialects.marker_tables import marks_of
from dragoman.dialects.readers.literals import PYTHON, read_literal, read_string
from dragoman.dialects.scan import TextSink, Wait, structure_of
from dragoman.dialects.schema import quote_json, whole_characters

if TYPE_CHECKING:
    from dragoman.dialects.state_machine import AnswerStateMachine

BARE_KEYS = frozenset({"type", "id", "index"})
"""Further keys that a call without a marker may have. With any other key the object is not a call."""
FRAME = re.compile(r'"(?:id|index)": (?:"[\w.:\-]{0,64}"|\d{1,9}|null)\s*|"type": "function"\s*', re.ASCII)
"""Members that belong to the frame of a call and are not emitted. All other unknown members become text."""
NO_ARGUMENTS = "{}"


def read_json_calls(m: "AnswerStateMachine", shape: JsonCalls) -> Wait[bool]:
    following = yield from m.space()
    listed = following == "[" and shape.list != "never"
    if listed:
        m.at += 1
        following = yield from m.space()
    if following != "{" or (not listed and shape.list == "must" and not shape.open):
        return False
    first = m.calls
    while True:
        m.begin_call(shape)
        reader = _ObjectReader(m, shape)
        complete = yield from reader.read()
        m.set_aside(reader.spared)
        if not complete:
            if m.calls == first or shape.whole or not reader.over:
                return False
            # A whole object that is not a call, after one that is: only this object becomes text.
            m.sink(m.roll_back())
        if not (yield from _another(m, shape, listed)):
            return True


def _another(m: "AnswerStateMachine", shape: JsonCalls, listed: bool) -> Wait[bool]:
    """Return whether a further object follows. Layout between two objects is skipped."""
    if not listed and not shape.several:
        return False
    m.begin_trial()
    following = yield from m.space()
    if following == "]" and listed:
        m.at += 1
        m.commit_trial()
        return False
    if following and following in ",;" and following == (shape.separator.strip() or following):
        m.at += 1
        following = yield from m.space()
    if following == "{":
        return True
    m.sink(m.abort_trial())
    return False


class _ObjectReader:
    """Parser of one object. Keys may come in any order, so arguments may have to wait for the name."""

    def __init__(self, machine: "AnswerStateMachine", shape: JsonCalls) -> None:
        self.m = machine
        self.shape = shape
        self.in_python = isinstance(shape, PythonObjects)
        self.name: str | None = None
        self.id: str | None = None
        self.early: list[str] = []
        self.opened = False
        self.ignored = False
        self.unsaid: list[str] = []
        self.over = False

    def read(self) -> Wait[bool]:
        m = self.m
        m.at += 1
        while True:
            following = yield from m.space()
            if following == "}":
                m.at += 1
                self.over = True
                return self._end()
            if following == ",":
                m.at += 1
                continue
            key = yield from self._string()
            if key is None or (yield from m.space()) != ":":
                m.set_aside("" if key is None else quote_json(key))
                return False
            m.at += 1
            following = yield from m.space()
            if not (yield from self._member(key, following)):
                return False

    def _member(self, key: str, following: str) -> Wait[bool]:
        shape = self.shape
        if isinstance(shape, KeyedCalls) and not self.opened:
            self.name = key
            return (yield from self._arguments(following))
        if key in shape.name and not self.opened:
            self._leave_twin(key, self.name)
            self.name = yield from self._string()
            if self.name is None or (shape.declared and self.name not in self.m.tools):
                return False
            if self.early:
                return self._open() and self._say("".join(self.early))
            return True
        if key in shape.arguments and not self.opened:
            return (yield from self._arguments(following))
        if key in shape.id and not self.opened and following in ("'", '"'):
            self._leave_twin(key, self.id)
            self.id = yield from self._string()
            return self.id is not None
        bare = not shape.open and shape.section is None
        if bare and key not in BARE_KEYS and (shape.declared or not self.opened):
            return False
        parts = [quote_json(key), ": "]
        complete = yield from self._value(parts.append)
        other = "".join(parts)
        self.m.set_aside("" if FRAME.fullmatch(other) else other)
        return complete

    def _leave_twin(self, key: str, value: str | None) -> None:
        """Set aside the earlier of two members with the same key: the last one counts."""
        self.m.set_aside("" if value is None else f'"{key}": {quote_json(value)}')

    def _arguments(self, following: str) -> Wait[bool]:
        """Read the arguments, an object. It must begin as JSON before anything of it is emitted."""
        if following == "n" and not self.shape.needs_arguments:
            return (yield from self._null())
        if not following and self.name is not None and self.shape.open:
            # The answer ends here: the name is certain, and no arguments were written.
            self._open()
        if following != "{":
            return False
        m, parts = self.m, ["{"]
        if self.in_python:
            outcome = self.name is not None and self._open()
            return (yield from self._value(self._sink if outcome else self.early.append))
        m.at += 1
        while (following := (yield from m.peek())).isspace():
            parts.append(following)
            m.at += 1
        if following not in ('"', "}", ""):
            return False
        sink: TextSink = self.early.append
        if self.name is not None:
            if not self._open():
                return False
            sink = self._sink
        sink("".join(parts))
        return (yield from self._container(sink, depth=1))

    def _null(self) -> Wait[bool]:
        """Read `null`, which some models write for no arguments."""
        parts: list[str] = []
        return (yield from self._value(parts.append)) and "".join(parts).strip() == "null"

    @property
    def _sink(self) -> TextSink:
        return self.unsaid.append if self.ignored else self.m.arguments

    @property
    def spared(self) -> str:
        """Arguments of a call that means "no call", if there are any."""
        text = "".join(self.unsaid)
        return "" if text.strip() == NO_ARGUMENTS else text

    def _say(self, text: str) -> bool:
        self._sink(text)
        return True

    def _open(self) -> bool:
        if not self.name:
            return False
        self.opened = True
        self.ignored = isinstance(self.shape, ActionCalls) and self.name in self.shape.ignored
        if self.ignored:
            self.m.commit_trial()
        else:
            self.m.open_call(self.name, self.id, self.shape)
        return True

    def _end(self) -> bool:
        if not self.opened:
            if self.name is None or self.shape.needs_arguments or not self._open():
                return False
            self._sink(NO_ARGUMENTS)
        if not self.ignored:
            self.m.close_call()
        return True

    # Values

    def _string(self) -> Wait[str | None]:
        """Read a whole string; return None if there is none."""
        m, parts = self.m, ['"']
        quote = yield from m.peek()
        if self.in_python and quote in ("'", '"') and quote:
            complete = yield from read_string(m, parts.append, PYTHON)
        elif quote == '"':
            m.at += 1
            complete = yield from m.json_string(parts.append)
        else:
            return None
        written = "".join(parts[1:] if self.in_python else parts)
        try:
            decoded: str | None = json.loads(written, strict=False) if complete else None
        except ValueError:
            decoded = None
        if decoded is None:
            m.set_aside(written)
            return None
        return whole_characters(decoded)

    def _value(self, sink: TextSink) -> Wait[bool]:
        """Read any value unchanged; Python literals become JSON."""
        m = self.m
        if self.in_python:
            return (yield from read_literal(m, sink, PYTHON))
        following = yield from m.peek()
        if following and following in "{[":
            return (yield from self._container(sink))
        if following == '"':
            m.at += 1
            sink('"')
            return (yield from m.json_string(sink))
        while (following := (yield from m.peek())) and following not in ",}]":
            sink(following)
            m.at += 1
        return bool(following)

    def _container(self, sink: TextSink, depth: int = 0) -> Wait[bool]:
        stops = marks_of(self.shape.close)
        structure = structure_of(tuple(stops.all))
        return (yield from self.m.json_container(sink, structure, stops, depth))


# `<open>NAME<then>{...}<close>`: the name outside, the arguments as a JSON object

# Lone surrogates stand for special tokens and are never part of a name or an id.
NAME = re.compile("\\s*[^\\s<>{}\\[\\]\"'\ud800-\udfff]*\\s*")
KIMI_ID = re.compile(r"(?:functions\.)?(.+):(\d+)", re.DOTALL)


def read_named_call(m: "AnswerStateMachine", shape: NamedCalls) -> Wait[bool]:
    named = yield from _name(m, shape)
    if named is None or named[0] in ("", shape.prefixed):
        return False
    name, id_ = named
    following = yield from m.space()
    if following not in ("{", ""):
        return False
    m.open_call(name, id_, shape)
    stops = marks_of(shape.close)
    complete = yield from m.json_container(m.arguments, structure_of(tuple(stops.all)), stops)
    if complete or (yield from m.peek_marker(stops)):
        m.close_call()
    return complete


def _name(m: "AnswerStateMachine", shape: NamedCalls) -> Wait[tuple[str, str | None] | None]:
    """Read the name, and the id if one is written."""
    id_: str | None = None
    if shape.id_first:
        id_, text = yield from m.collect(marks_of((shape.id_first,)), NAME)
        if not text:
            return None
    direct = "" in shape.then
    ends = marks_of(shape.then, (shape.id_after,), ("{",) if direct else ())
    header, text = yield from m.collect(ends, NAME)
    if text == shape.id_after and text:
        id_, text = yield from m.collect(marks_of(shape.then), NAME)
    if not text:
        return None
    if text == "{":
        m.at -= 1
    return _kimi(header.strip(), m, shape) if shape.prefixed else (header.strip(), id_ and id_.strip())


def _kimi(id_: str, m: "AnswerStateMachine", shape: NamedCalls) -> tuple[str, str | None] | None:
    """Split `functions.NAME:0`, which is an id that contains the name. Without a number it must be a tool's
    name.
    """
    if match := KIMI_ID.fullmatch(id_):
        return match.group(1), id_
    name = id_.removeprefix(shape.prefixed)
    return (name, None) if name in m.tools else None
