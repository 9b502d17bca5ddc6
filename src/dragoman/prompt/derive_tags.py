"""Calls whose arguments are each between tags: the tags, read off the differences of renderings."""

from typing import Literal, TypeAlias

from msgspec import Struct

from dragoman.dialects.declare import TaggedCalls
from dragoman.prompt.differences import segments, shared_end, shared_start, without_end
from dragoman.prompt.frames import Bodies, Span, frame
from dragoman.prompt.probe import KEYS, NAMES, NUMBER, VALUES

_Types: TypeAlias = Literal["string", "name"]


class _Tags(Struct, frozen=True):
    then: str
    key: str
    key_end: str
    value_end: str


class _Places(Struct, frozen=True):
    """Where a call's name, its first key and the value of that begin."""

    name: int
    key: int
    value: int


def tagged_calls(bodies: Bodies) -> TaggedCalls | None:
    """`<f><k>a</k><v>x</v></f>`, in whatever tags."""
    one = _places(bodies.one, 0, 0)
    tags = _tags(bodies, one) if one else None
    if one is None or tags is None:
        return None
    first = _places(bodies.two or "", 0, 0)
    second = _places(bodies.two or "", 1, first.value) if first else None
    both = (_span(first, tags), _span(second, tags)) if first and second else None
    framed = frame(bodies, _span(one, tags), both)
    if framed.several or not framed.open.strip():
        return None
    key_end, value = _key_end(tags.key_end)
    stated = _stated_type(bodies, one, tags)
    if stated is not None:
        before, after, kind = stated
        return TaggedCalls(
            then=(tags.then,), key=(tags.key,), key_end=(before,), type_end=(after,), types=kind,
            value_end=(tags.value_end,), **framed.markers(),
        )  # fmt: skip
    return TaggedCalls(
        then=(tags.then,), key=(tags.key,), key_end=(key_end,), value=value, value_end=(tags.value_end,),
        **framed.markers(),
    )  # fmt: skip


def _places(body: str, number: int, start: int) -> _Places | None:
    name = body.find(NAMES[number], start)
    key = body.find(KEYS[0], name) if name >= 0 else -1
    value = body.find(VALUES[number], key) if key >= 0 else -1
    return _Places(name, key, value) if value >= 0 else None


def _span(places: _Places, tags: _Tags) -> Span:
    return places.name, places.value + len(VALUES[0]) + len(tags.value_end)


def _tags(bodies: Bodies, one: _Places) -> _Tags | None:
    """Two arguments say where a value ends and the next key begins."""
    before_key = bodies.one[one.name + len(NAMES[0]) : one.key]
    key_end = bodies.one[one.key + len(KEYS[0]) : one.value]
    after = bodies.one[one.value + len(VALUES[0]) :]
    pair = bodies.pair or ""
    first, second = pair.find(VALUES[0]), pair.find(KEYS[1])
    if not 0 <= first < second:
        return None
    middle = pair[first + len(VALUES[0]) : second]
    # Layout between two tags belongs to the first: then it is also there when no second follows.
    key = shared_end(before_key, middle).lstrip()
    if not key or not key_end.strip():
        return None
    value_end = shared_start(without_end(middle, key), after)
    return _Tags(without_end(before_key, key), key, key_end, value_end) if value_end.strip() else None


def _key_end(text: str) -> tuple[str, str]:
    """`</k>\\n<v>` is two tags, with layout between them that may be missing."""
    parts = segments(text)
    gaps = [number for number, part in enumerate(parts) if part.isspace() and number]
    tag = next((number for number in reversed(range(len(parts))) if parts[number].startswith("<")), None)
    if tag and tag - 1 in gaps and parts[0].startswith("</"):
        return "".join(parts[:tag]), "".join(parts[tag:])
    return text, ""


def _stated_type(bodies: Bodies, one: _Places, tags: _Tags) -> tuple[str, str, _Types] | None:
    """`string="true"` where a word is given and `string="false"` where a number is."""
    after = bodies.one[one.value + len(VALUES[0]) :]
    whole = bodies.number or ""
    key = whole.find(KEYS[0])
    if key < 0 or not whole.endswith(f"{NUMBER}{after}"):
        return None
    number_end = whole[key + len(KEYS[0]) : len(whole) - len(f"{NUMBER}{after}")]
    if number_end == tags.key_end:
        return None
    before = shared_start(tags.key_end, number_end)
    behind = shared_end(tags.key_end[len(before) :], number_end[len(before) :])
    word = without_end(tags.key_end[len(before) :], behind)
    kinds: dict[str, _Types] = {"true": "string", "string": "name"}
    return (before, behind, kinds[word]) if word in kinds else None
