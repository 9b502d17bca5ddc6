"""A page of a list, as all lists of OpenAI's APIs are."""

from collections.abc import Sequence
from typing import Any

import msgspec

from dragoman.store import Item, Record

_encode = msgspec.json.Encoder().encode


def page(stored: Sequence[Item | Record], has_more: bool) -> list[bytes]:
    """Objects that are JSON already are neither read again nor copied: the page is in parts."""
    ends: dict[str, Any] = {"first_id": None, "last_id": None, "has_more": has_more}
    if stored:
        ends |= {"first_id": stored[0].id, "last_id": stored[-1].id}
    parts = [part for one in stored for part in (b",", one.body)][1:]
    return [b'{"object":"list","data":[', *parts, b"]," + _encode(ends)[1:]]
