"""All that is used of uvicorn: what it documents, and what it does not.

`StrictProtocol` goes on where its protocol for httptools ends, and a token is written without a message and a
coroutine for it. Nobody has promised us that those insides stay as they are. So nothing else in this package
imports uvicorn; `INSIDES` names what is used of each class; the versions that are taken are bounded on both
sides; and `tests/http/test_uvicorn_parts.py` fails on one that has changed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from uvicorn import Config, Server
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from dragoman.http.connection.transport import PatientTransport

__all__ = [
    "INSIDES",
    "ASGI3Application",
    "Config",
    "HttpToolsProtocol",
    "RequestResponseCycle",
    "Server",
    "ServerState",
    "has_left",
    "listens",
    "pass_on",
    "short_cut",
    "together",
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
"""Writes at once and says True; or does nothing, because the client is slow or gone, and says False."""


def short_cut(send: object) -> ShortCut | None:
    """A piece as uvicorn writes it, without a message and a coroutine for each token.

    For a `send` whose reply has begun as a stream; None where that is not uvicorn's.
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


def has_left(send: object) -> bool:
    """Whether the client is known to have left, so that nothing need be made for it."""
    cycle = getattr(send, "__self__", None)
    return isinstance(cycle, RequestResponseCycle) and cycle.disconnected


def listens(send: object) -> bool:
    """Whether it is told when the client leaves, from now on: where the server is uvicorn's."""
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return False
    # A long body may have stopped it.
    cycle.flow.resume_reading()
    return True


@contextmanager
def together(send: object, later: Callable[[Callable[[], None]], None] | None = None) -> Iterator[None]:
    """What is sent inside leaves in one go, where that can be: the head of a reply and its first bytes.

    With `later` it leaves with what is sent next, or when what `later` is given is called.
    """
    cycle = getattr(send, "__self__", None)
    transport = cycle.transport if isinstance(cycle, RequestResponseCycle) else None
    if not isinstance(transport, PatientTransport):
        yield
        return
    transport.hold()
    try:
        yield
    finally:
        if later is None:
            transport.release()
        else:
            transport.wait_for_more()
            later(transport.release)


def pass_on(server: Server, signal: int) -> None:
    """The program gets this signal too, when the server has stopped."""
    server._captured_signals.append(signal)
