"""Less work for a streamed body than ASGI has, where the server is our own uvicorn."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from dragoman.http.connection.transport import PatientTransport

ShortCut: TypeAlias = Callable[[bytes], bool]
"""Writes at once and says True; or does nothing, because the client is slow or gone, and says False."""


def short_cut(send: object) -> ShortCut | None:
    """A piece as uvicorn writes it, without a message and a coroutine for each token.

    For a `send` whose reply has begun as a stream; None where that is not uvicorn's.
    """
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


def has_left(send: object) -> bool:
    """Whether the client is known to have left, so that nothing need be made for it."""
    cycle = getattr(send, "__self__", None)
    return isinstance(cycle, RequestResponseCycle) and cycle.disconnected


@contextmanager
def together(send: object) -> Iterator[None]:
    """What is sent inside leaves in one go, where that can be: the head of a reply and its first bytes."""
    cycle = getattr(send, "__self__", None)
    transport = cycle.transport if isinstance(cycle, RequestResponseCycle) else None
    if not isinstance(transport, PatientTransport):
        yield
        return
    transport.hold()
    try:
        yield
    finally:
        transport.release()
