"""Cache of parsed request bodies: a body that extends a cached one is parsed only from where that one ended.

A client sends all messages of a conversation with every request: the bytes of its last request, then the new
messages. Checking the shape of all of them, decoding and validating them costs more with every turn. Recent
bodies are therefore cached up to the end of their messages, with what was parsed from them:

    known      {"model": "m", "messages": [{...}, {...}
    the body   {"model": "m", "messages": [{...}, {...}, {...}, {...}], "tools": [...]}
    is read    {"model": "m", "messages": [              {...}, {...}], "tools": [...]}

A JSON parser is in the same state after the same bytes, so the bytes that follow mean the same in both
bodies. If anything in the shortened body is invalid, the full body is parsed, which reports the error and its
position.
"""

from collections.abc import Hashable
from contextlib import suppress
from itertools import count

import msgspec
import numpy as np
from msgspec import Struct

from dragoman.api.chat.request import READER, ChatRequest, MessageBody, check_request, to_message
from dragoman.api.request_decoder import IgnoredFields, check_shape
from dragoman.errors import BadRequest
from dragoman.json_size import Amount, count_amount, most_amount, strip_strings
from dragoman.limits import Limits
from dragoman.owner_cache import OwnerCache
from dragoman.types import Message

MOST_BYTES = 64 * 1024 * 1024
WEIGHT, VALUE = 3, 300
"""Estimated memory of a cached body: bytes per byte of it (the body, the decoded values, the template's
messages), and bytes per value in it, each of which is an object twice."""
SHARE = 8
"""A single body may use at most this fraction (1/8) of the cache."""
_SPACE = b" \t\r\n"
_FIELD = "messages"
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class CachedBody(Struct):
    start: bytes
    """The bytes up to the end of the last message."""
    first: int
    """Offset of the first message."""
    amount: Amount
    """Number of values in the messages, for the limits."""
    bodies: list[MessageBody]
    messages: tuple[Message, ...]
    salt: str | None


class BodyCache:
    """Cache of recent request bodies, per owner. Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._kept = OwnerCache[CachedBody](most_bytes)
        self._largest = most_bytes // SHARE
        self._numbers = count()

    def read(
        self, body: bytes, owner: str, limits: Limits, ignored: IgnoredFields
    ) -> tuple[ChatRequest, tuple[Message, ...]]:
        """Return the request, and its cached messages as the template receives them."""
        number, known = self._find(body, owner)
        pair: tuple[ChatRequest, CachedBody | None] | None = None
        if known is not None:
            # Errors in the shortened body are ignored: parsing the full body reports them with their
            # position.
            with suppress(BadRequest):
                pair = _go_on(known, body, limits, ignored)
        request, now = pair or _read_whole(body, limits, ignored)
        if now is not None and _FIELD not in ignored.summary:
            weight = WEIGHT * len(now.start) + VALUE * now.amount[0]
            if weight <= self._largest:
                self._kept.put(owner, next(self._numbers), now, weight, number)
        return request, now.messages if now else ()

    def _find(self, body: bytes, owner: str) -> tuple[Hashable, CachedBody | None]:
        """Return the longest cached body that this one extends."""
        extended = [each for each in self._kept.all(owner) if body.startswith(each[1].start)]
        return max(extended, key=lambda each: len(each[1].start), default=(None, None))


def _read_whole(body: bytes, limits: Limits, ignored: IgnoredFields) -> tuple[ChatRequest, CachedBody | None]:
    check_shape(body, limits)
    request: ChatRequest = READER.read(body, ignored)
    check_request(request, limits, ignored)
    position = _find_messages(body)
    if position is None or not request.messages:
        return request, None
    first, end = position
    messages = tuple(map(to_message, request.messages))
    amount = count_amount(strip_strings(body[first:end]))
    return request, CachedBody(body[:end], first, amount, request.messages, messages, request.cache_salt)


def _go_on(
    known: CachedBody, body: bytes, limits: Limits, ignored: IgnoredFields
) -> tuple[ChatRequest, CachedBody] | None:
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
    position = _find_messages(new)
    if position is None or request.messages is None or request.cache_salt != known.salt:
        return None
    _, end = position
    new_messages = request.messages
    request.messages = [*known.bodies, *new_messages]
    check_request(request, limits, ignored, len(known.bodies))
    messages = known.messages + tuple(map(to_message, new_messages))
    if more:
        amount = _sum(amount, count_amount(strip_strings(new[known.first : end])), (1, 0, 0))
    start = body[: end + len(body) - len(new)] if more else known.start
    return request, CachedBody(start, known.first, amount, request.messages, messages, known.salt)


def _find_messages(body: bytes) -> tuple[int, int] | None:
    """Return the offsets of the start of the first message and the end of the last."""
    raw = _members(body).get(_FIELD)
    if raw is None:
        return None
    field = memoryview(raw)
    # `Raw` values are slices of the body, not copies, so their addresses give the offset.
    start = np.frombuffer(field, np.uint8).ctypes.data - np.frombuffer(body, np.uint8).ctypes.data
    if not 0 <= start < len(body) or body[start : start + 1] != b"[":
        return None
    return start + 1, start + len(field[:-1].tobytes().rstrip(_SPACE))


def _fits(amount: Amount, limits: Limits) -> bool:
    return all(one <= most for one, most in zip(amount, most_amount(limits), strict=True))


def _sum(*amounts: Amount) -> Amount:
    values, lists, names = zip(*amounts, strict=True)
    return sum(values), sum(lists), sum(names)
