"""Server-sent events: one encoder. Payloads are JSON, so no text can forge the end of an event."""

from typing import Any

import msgspec

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
