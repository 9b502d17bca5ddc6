"""`<open>NAME<then>{...}<close>`: the name outside, the arguments as a JSON object."""

import re
from typing import TYPE_CHECKING

from dragoman.dialects.compiled import marks_of
from dragoman.dialects.declare import NamedCalls
from dragoman.dialects.scan import Wait, structure_of

if TYPE_CHECKING:
    from dragoman.dialects.machine import Machine

# Lone surrogates stand for special tokens, and none of them is part of a name or an id.
NAME = re.compile("\\s*[^\\s<>{}\\[\\]\"'\ud800-\udfff]*\\s*")
KIMI_ID = re.compile(r"(?:functions\.)?(.+):(\d+)", re.DOTALL)


def read_named_call(m: "Machine", shape: NamedCalls) -> Wait[bool]:
    named = yield from _name(m, shape)
    if named is None:
        return False
    name, id_ = named
    following = yield from m.space()
    if following not in ("{", ""):
        return False
    m.open_call(name, id_, shape)
    stops = marks_of(shape.close)
    complete = yield from m.json_container(m.arguments, structure_of(tuple(stops.all)), stops)
    if complete or (yield from m.stands(stops)):
        m.close_call()
    return complete


def _name(m: "Machine", shape: NamedCalls) -> Wait[tuple[str, str | None] | None]:
    """The name and the id, if one is written."""
    id_: str | None = None
    if shape.id_first:
        id_, found = yield from m.collect(marks_of((shape.id_first,)), NAME)
        if not found:
            return None
    direct = "" in shape.then
    ends = marks_of(shape.then, (shape.id_after,), ("{",) if direct else ())
    header, found = yield from m.collect(ends, NAME)
    if found == shape.id_after and found:
        id_, found = yield from m.collect(marks_of(shape.then), NAME)
    if not found:
        return None
    if found == "{":
        m.at -= 1
    return _kimi(header.strip(), shape) if shape.prefixed else (header.strip(), id_ and id_.strip())


def _kimi(id_: str, shape: NamedCalls) -> tuple[str, str | None] | None:
    """`functions.NAME:0` is the id, and holds the name."""
    found = KIMI_ID.fullmatch(id_)
    return (found.group(1), id_) if found else None
