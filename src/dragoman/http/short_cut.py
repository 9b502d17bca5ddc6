"""A piece of a streamed body, as uvicorn writes it, without a message and a coroutine for each token."""

from collections.abc import Callable
from typing import TypeAlias

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

ShortCut: TypeAlias = Callable[[bytes], bool]
"""Writes at once and says True; or does nothing, because the client is slow or gone, and says False."""


def short_cut(send: object) -> ShortCut | None:
    """For a `send` whose reply has begun as a stream; None where that is not uvicorn's."""
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or not cycle.chunked_encoding:
        return None
    flow, write = cycle.flow, cycle.transport.write

    def written(data: bytes) -> bool:
        if flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return written
