"""A page of a list, as all lists of OpenAI's APIs are."""

from collections.abc import Sequence
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


class _Identified(msgspec.Struct):
    id: str


_id = msgspec.json.Decoder(_Identified).decode


def page(bodies: Sequence[bytes], has_more: bool) -> bytes:
    """Objects that are JSON already are not read again, but for the ids of the first and the last."""
    ends: dict[str, Any] = {"first_id": None, "last_id": None, "has_more": has_more}
    if bodies:
        ends |= {"first_id": _id(bodies[0]).id, "last_id": _id(bodies[-1]).id}
    return b'{"object":"list","data":[' + b",".join(bodies) + b"]," + _encode(ends)[1:]
