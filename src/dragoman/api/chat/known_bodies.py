"""Bodies that are known: one that goes on from another is read from where that one has ended.

A client sends all messages of a conversation again each time: the very bytes of last time, and then what is
new. To look at the shape of them all, to decode and to check them costs more with every turn. So the bodies
of lately are kept, up to the end of their messages, with what was read there:

    known      {"model": "m", "messages": [{...}, {...}
    the body   {"model": "m", "messages": [{...}, {...}, {...}, {...}], "tools": [...]}
    is read    {"model": "m", "messages": [              {...}, {...}], "tools": [...]}

Whoever reads JSON is in the same place with the same bytes before it, so what follows means the same there.
Whatever is not as it should be has the whole body read, which tells what is wrong, and where.
"""

from collections.abc import Hashable
from contextlib import suppress
from itertools import count

import msgspec
import numpy as np
from msgspec import Struct

from dragoman.api.chat.request import READER, ChatRequest, MessageBody, check_request, to_message
from dragoman.api.read import Ignored, check_shape
from dragoman.errors import BadRequest
from dragoman.json_amount import Amount, count_amount, most_amount, outside_of_strings
from dragoman.lately import Lately
from dragoman.limits import Limits
from dragoman.types import Message

MOST_BYTES = 64 * 1024 * 1024
WEIGHT, VALUE = 3, 300
"""Bytes that are kept for each of a body: itself, what was decoded, and what a template is given; and for
each value in it, which is an object twice over."""
SHARE = 8
"""One body has at most so small a part of all."""
_SPACE = b" \t\r\n"
_FIELD = "messages"
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class KnownBody(Struct):
    start: bytes
    """Up to the end of the last message."""
    first: int
    """Where the messages begin."""
    amount: Amount
    """Of the messages."""
    bodies: list[MessageBody]
    messages: tuple[Message, ...]
    salt: str | None


class KnownBodies:
    """The bodies of lately. Threads may share it."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._kept = Lately[KnownBody](most_bytes)
        self._largest = most_bytes // SHARE
        self._numbers = count()

    def read(
        self, body: bytes, owner: str, limits: Limits, ignored: Ignored
    ) -> tuple[ChatRequest, tuple[Message, ...]]:
        """What is asked, and those of its messages that are known as a template is given them."""
        number, known = self._find(body, owner)
        made: tuple[ChatRequest, KnownBody | None] | None = None
        if known is not None:
            # What is wrong with it is told by whoever reads it all, with its place there.
            with suppress(BadRequest):
                made = _go_on(known, body, limits, ignored)
        request, now = made or _read_whole(body, limits, ignored)
        if now is not None and _FIELD not in ignored.told:
            weight = WEIGHT * len(now.start) + VALUE * now.amount[0]
            if weight <= self._largest:
                self._kept.put(owner, next(self._numbers), now, weight, number)
        return request, now.messages if now else ()

    def _find(self, body: bytes, owner: str) -> tuple[Hashable, KnownBody | None]:
        """The longest that this one goes on from."""
        found = [each for each in self._kept.all(owner) if body.startswith(each[1].start)]
        return max(found, key=lambda each: len(each[1].start), default=(None, None))


def _read_whole(body: bytes, limits: Limits, ignored: Ignored) -> tuple[ChatRequest, KnownBody | None]:
    check_shape(body, limits)
    request: ChatRequest = READER.read(body, ignored)
    check_request(request, limits, ignored)
    place = _find_messages(body)
    if place is None or not request.messages:
        return request, None
    first, end = place
    messages = tuple(map(to_message, request.messages))
    amount = count_amount(outside_of_strings(body[first:end]))
    return request, KnownBody(body[:end], first, amount, request.messages, messages, request.cache_salt)


def _go_on(
    known: KnownBody, body: bytes, limits: Limits, ignored: Ignored
) -> tuple[ChatRequest, KnownBody] | None:
    rest = body[len(known.start) :].lstrip(_SPACE)
    more = rest.startswith(b",")
    rest = rest[1:].lstrip(_SPACE) if more else rest
    if not rest.startswith(b"{" if more else b"]"):
        return None
    new = body[: known.first] + rest
    amount = known.amount
    if not _fits(_sum(amount, count_amount(new), (1, 0, 0)), limits):
        return None
    check_shape(new, limits)
    request: ChatRequest = READER.read(new, ignored)
    place = _find_messages(new)
    if place is None or request.messages is None or request.cache_salt != known.salt:
        return None
    _, end = place
    new_messages = request.messages
    request.messages = [*known.bodies, *new_messages]
    check_request(request, limits, ignored, len(known.bodies))
    messages = known.messages + tuple(map(to_message, new_messages))
    if more:
        amount = _sum(amount, count_amount(outside_of_strings(new[known.first : end])), (1, 0, 0))
    start = body[: end + len(body) - len(new)] if more else known.start
    return request, KnownBody(start, known.first, amount, request.messages, messages, known.salt)


def _find_messages(body: bytes) -> tuple[int, int] | None:
    """Where the first of them begins, and the last one ends."""
    raw = _members(body).get(_FIELD)
    if raw is None:
        return None
    field = memoryview(raw)
    # What is not decoded is not copied either: it is a part of the body.
    start = np.frombuffer(field, np.uint8).ctypes.data - np.frombuffer(body, np.uint8).ctypes.data
    if not 0 <= start < len(body) or body[start : start + 1] != b"[":
        return None
    return start + 1, start + len(field[:-1].tobytes().rstrip(_SPACE))


def _fits(amount: Amount, limits: Limits) -> bool:
    return all(one <= most for one, most in zip(amount, most_amount(limits), strict=True))


def _sum(*amounts: Amount) -> Amount:
    values, lists, names = zip(*amounts, strict=True)
    return sum(values), sum(lists), sum(names)
