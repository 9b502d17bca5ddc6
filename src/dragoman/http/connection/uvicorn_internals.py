"""Everything used of uvicorn, documented and undocumented.

`StrictProtocol` extends its protocol for httptools, and tokens are written without a message and a coroutine
each. These internals may change in any version. Therefore nothing else in this package imports uvicorn;
`INSIDES` lists the members used of each class; the supported versions are bounded on both sides; and
`tests/http/test_uvicorn_internals.py` fails for a version that has changed them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from uvicorn import Config, Server
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from dragoman.http.connection.transport import LingeringTransport

__all__ = [
    "INSIDES",
    "ASGI3Application",
    "Config",
    "HttpToolsProtocol",
    "RequestResponseCycle",
    "Server",
    "ServerState",
    "corked",
    "is_disconnected",
    "listens",
    "pass_on",
    "short_cut",
]

# fmt: off
INSIDES: dict[type, tuple[str, ...]] = {
    HttpToolsProtocol: (
        "app", "connections", "cycle", "flow", "headers", "loop", "parser", "pipeline", "scheme", "scope",
        "server_state", "tasks", "transport", "url", "on_message_begin", "on_url", "on_header",
        "on_headers_complete", "on_body", "on_message_complete", "on_response_complete", "_get_upgrade",
        "_should_upgrade", "_start_asgi_task", "_unset_keepalive_if_required",
    ),
    RequestResponseCycle: (
        "chunked_encoding", "disconnected", "flow", "keep_alive", "message_event", "response_complete",
        "response_started", "send", "transport",
    ),
    FlowControl: ("resume_reading", "write_paused"),
    ServerState: ("connections", "default_headers"),
    Server: (
        "_captured_signals", "capture_signals", "force_exit", "handle_exit", "on_tick", "server_state",
        "should_exit", "shutdown", "started", "startup",
    ),
}
# fmt: on

ShortCut: TypeAlias = Callable[[bytes], bool]
"""Writes the bytes and returns True; or does nothing and returns False, because the client is slow or gone.
"""


def short_cut(send: object) -> ShortCut | None:
    """Return a function that writes a chunk as uvicorn does, without a message and a coroutine per token.

    `send` must have begun a streaming reply; the result is None if it is not uvicorn's.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or not cycle.chunked_encoding:
        return None
    flow, transport = cycle.flow, cycle.transport

    def written(data: bytes) -> bool:
        if flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return written


def is_disconnected(send: object) -> bool:
    """Return whether the client is known to have disconnected, so that its request need not be processed."""
    cycle = getattr(send, "__self__", None)
    return isinstance(cycle, RequestResponseCycle) and cycle.disconnected


def listens(send: object) -> bool:
    """Return whether the server is uvicorn, which from now on notices a disconnect of the client."""
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return False
    # A long body may have paused reading.
    cycle.flow.resume_reading()
    return True


@contextmanager
def corked(send: object, later: Callable[[Callable[[], None]], None] | None = None) -> Iterator[None]:
    """Send everything from inside the block together, if possible: the head of a reply and its first bytes.

    With `later` it is sent with the next write, or when the function passed to `later` is called.
    """
    cycle = getattr(send, "__self__", None)
    transport = cycle.transport if isinstance(cycle, RequestResponseCycle) else None
    if not isinstance(transport, LingeringTransport):
        yield
        return
    transport.cork()
    try:
        yield
    finally:
        if later is None:
            transport.uncork()
        else:
            transport.uncork_on_next_write()
            later(transport.uncork)


def pass_on(server: Server, signal: int) -> None:
    """Forward this signal to the program after the server has stopped."""
    server._captured_signals.append(signal)
