"""Server-sent events: one encoder. Payloads are JSON, so no text can forge the end of an event."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from dragoman.store import Item, Record

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    return b"data: " + encode(payload) + b"\n\n"


def around(payload: dict[str, Any], hole: str) -> tuple[bytes, ...]:
    """An event cut wherever `hole` stands as a value: only what goes between changes from token to token.

    >>> around({"a": 1, "b": "HOLE"}, "HOLE")
    (b'data: {"a":1,"b":', b'}\\n\\n')
    """
    return tuple(event(payload).split(encode(hole)))


# Big replies as JSON. Encoded in one call, they would stop everything else in the process for as long.


PIECE = 64 * 1024
"""Characters of a text, or entries of a list of plain values, that are encoded in one go."""
BIG = 1024 * 1024
AT_ONCE = 4096
"""Pieces that are joined in one go."""
_encode = msgspec.json.Encoder().encode
_PLAIN = (str, int, float, bool, type(None))


def writer(size: int) -> Callable[[Any], bytes]:
    """What encodes values of about so many bytes: in pieces takes longer, where there is no need for it."""
    return encoded if size > BIG else _encode


def encoded(value: Any) -> bytes:
    """What `msgspec.json.encode` gives: `encoded({"a": [1]})` is `b'{"a":[1]}'`."""
    return b"".join(_joined(_pieces(value)))


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    # Of a million small ones, joining and letting go of them is a long call, too.
    while some := list(islice(pieces, AT_ONCE)):
        yield b"".join(some)


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        yield from _object(value)
    elif isinstance(value, list | tuple) and value:
        yield from _list(value)
    elif isinstance(value, str) and len(value) > PIECE:
        yield b'"'
        yield from (_encode(value[at : at + PIECE])[1:-1] for at in range(0, len(value), PIECE))
        yield b'"'
    else:
        yield _encode(value)


def _object(value: dict[Any, Any]) -> Iterator[bytes]:
    yield b"{"
    for number, (name, each) in enumerate(value.items()):
        yield b"%b%b:" % (b"," if number else b"", _encode(name))
        yield from _pieces(each)
    yield b"}"


def _list(value: list[Any] | tuple[Any, ...]) -> Iterator[bytes]:
    # Lists that begin with a plain value mostly have only such, and none of them long.
    plain = isinstance(value[0], _PLAIN) and not (isinstance(value[0], str) and len(value[0]) > PIECE)
    step = PIECE if plain else 1
    for at in range(0, len(value), step):
        yield b"," if at else b"["
        if plain:
            yield _encode(value[at : at + step])[1:-1]
        else:
            yield from _pieces(value[at])
    yield b"]"


def page(stored: Sequence[Item | Record], has_more: bool) -> list[bytes]:
    """Objects that are JSON already are neither read again nor copied: the page is in parts."""
    ends: dict[str, Any] = {"first_id": None, "last_id": None, "has_more": has_more}
    if stored:
        ends |= {"first_id": stored[0].id, "last_id": stored[-1].id}
    parts = [part for one in stored for part in (b",", one.body)][1:]
    return [b'{"object":"list","data":[', *parts, b"]," + _encode(ends)[1:]]
