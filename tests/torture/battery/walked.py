"""Cases that follow from the types of requests, so that a new field is in them without a word about it here.

Every field is made as large as a body may be and then smaller, step by step, until it is taken: the largest
that is legal is among them, and all that are larger must be refused without much work.
"""

import json
from collections.abc import Callable, Iterator
from typing import TypeAlias

from msgspec import Struct, inspect

from tests.attacks.bodies import GOOD
from tests.attacks.fields import TYPES, Site, sample, sites
from tests.torture.battery.case import LIMITS, MOST_BYTES, MOST_VALUES, Case, posted

Grown: TypeAlias = Callable[[int], str]
"""A piece of JSON with so many of something in it."""

SIZES = (MOST_BYTES, LIMITS.content_chars, LIMITS.grammar_chars, LIMITS.pattern_chars, LIMITS.stop_chars, 64)
COUNTS = (
    MOST_VALUES,
    LIMITS.json_names - 1024,
    LIMITS.content_parts,
    LIMITS.messages,
    LIMITS.logit_bias,
    LIMITS.tools,
    LIMITS.prompts,
    64,
    16,
)
DEPTHS = (LIMITS.json_depth - 8, LIMITS.schema_depth - 2)


class Ladder(Struct, frozen=True):
    """One dimension of one field, from the largest down. The first that is taken is the last that is sent."""

    route: str
    name: str
    rungs: tuple[Case, ...]


def ladders(type_: str | None = None) -> list[Ladder]:
    """All that there are, or those of one type of request."""
    result = [ladder for site in _own() if type_ in (None, site.type) for ladder in _of(site)]
    for name, routes in TYPES.items():
        if type_ in (None, name):
            result += _names(routes[0])
    return result


def _own() -> Iterator[Site]:
    """Without the fields that one type of request has from another, where they have been tried."""
    tried: set[str] = set()
    for site in sites(inspect.Type):
        if site.type == "ChatRequest":
            tried.add(site.place)
        if site.type != "TokenizeChatRequest" or site.place not in tried:
            yield site


def _of(site: Site) -> Iterator[Ladder]:
    match site.kind:
        case inspect.StrType():
            yield _ladder(site, "characters", SIZES, _text_of("a"))
            yield _ladder(site, "characters of 4 bytes", (MOST_BYTES // 4,), _text_of("\U0001f600"))
            yield _ladder(site, "escapes", (MOST_BYTES // 6,), _text_of("\\u0000"))
        case inspect.ListType(item_type=item):
            one = json.dumps(sample(item))
            yield _ladder(site, "elements", _fitting(one, COUNTS), _list_of(one))
        case inspect.DictType(value_type=value):
            one = json.dumps(sample(value))
            yield _ladder(site, "members", _fitting(f'"1000000":{one}', COUNTS), _dict_of(one))
            yield _ladder(site, "characters of a name", SIZES, lambda n: '{"' + "a" * n + f'":{one}}}')
        case inspect.AnyType():
            yield _ladder(site, "numbers", COUNTS, _list_of("0"))
            yield _ladder(site, "empty objects", COUNTS, _list_of("{}"))
            yield _ladder(site, "values within each other", DEPTHS, lambda n: '{"a":' * n + "0" + "}" * n)
            yield _ladder(site, "characters", SIZES, _text_of("a"))


def _names(route: str) -> list[Ladder]:
    """What is no field at all: names that are long, many, or twice."""
    return [
        _whole(route, "characters of an unknown name", SIZES, lambda n: '"' + "a" * n + '":1'),
        _whole(
            route,
            "unknown names",
            (800_000, 60_000, 1024),
            lambda n: ",".join(f'"{at:07}":1' for at in range(n)),
        ),
        _whole(route, "names that come twice", (500_000, 60_000, 2), lambda n: ",".join(['"model":"a"'] * n)),
        _whole(route, "digits of a number", (MOST_BYTES, 64), lambda n: '"user":' + "9" * n),
        _whole(route, "spaces", (MOST_BYTES,), lambda n: " " * n + '"user":"a"'),
        _whole(
            route,
            "brackets within each other",
            (MOST_BYTES, 120),
            lambda n: '"user":' + "[" * (n // 2) + "]" * (n // 2),
        ),
    ]


def _ladder(site: Site, what: str, sizes: tuple[int, ...], grown: Grown) -> Ladder:
    route = TYPES[site.type][0]
    rungs = tuple(
        posted(route, f"{site.place[1:]}: {size:,} {what}", lambda size: site.body(route, grown(size)), size)
        for size in sizes
    )
    return Ladder(route, f"{site.place[1:]}: {what}", rungs)


def _whole(route: str, what: str, sizes: tuple[int, ...], grown: Grown) -> Ladder:
    good = json.dumps(GOOD[route])[1:-1]

    def body(size: int) -> bytes:
        return ("{" + ", ".join(part for part in (good, grown(size)) if part) + "}").encode()

    rungs = tuple(posted(route, f"{size:,} {what}", body, size) for size in sizes)
    return Ladder(route, what, rungs)


def _text_of(one: str) -> Grown:
    return lambda n: '"' + one * n + '"'


def _list_of(one: str) -> Grown:
    return lambda n: "[" + ",".join([one] * n) + "]"


def _dict_of(one: str) -> Grown:
    return lambda n: "{" + ",".join(f'"{at}":{one}' for at in range(n)) + "}"


def _fitting(one: str, counts: tuple[int, ...]) -> tuple[int, ...]:
    """As many as the body holds, in bytes and in values, and then fewer."""
    values = 1 + sum(one.count(mark) for mark in "[{,")
    most = min(MOST_BYTES // (len(one) + 2), MOST_VALUES // values)
    return (most, *(count for count in counts if count < most))
