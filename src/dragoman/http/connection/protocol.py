"""HTTP on a connection: deadlines, limits, and no input that two parsers could read differently.

httptools parses the bytes and calls `on_...` for each part of a message; uvicorn's protocol, the base class,
makes a request of them and calls the app. The checks here come before that: an error leaves the parser as a
`_Refusal`, is sent in the format of the API that the path belongs to, and closes the connection, because the
start of the next message is unknown. A connection is idle, in a head or in a body; head and body each have a
deadline.
"""

import asyncio
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools
import msgspec

from dragoman.api.multipart import MEDIA
from dragoman.errors import (
    BadRequest,
    BodyTooLarge,
    DragomanError,
    HeadersTooLarge,
    RequestTimeout,
    Unavailable,
)
from dragoman.http.connection.limiter import CountedConnection
from dragoman.http.connection.transport import LingeringTransport, ReadTimeout, Stage, WriteTimeout
from dragoman.http.connection.uvicorn_internals import (
    ASGI3Application,
    Config,
    HttpToolsProtocol,
    RequestResponseCycle,
    ServerState,
)
from dragoman.http.connection.websocket import VERSION, WebSocketProtocol, accept_handshake
from dragoman.http.routes.table import errors_at
from dragoman.settings import Settings

if TYPE_CHECKING:
    from dragoman.http.app_state import AppState

MOST_UNREAD = 64 * 1024
"""Bytes of a body that are still read after its reply or error was sent."""
MOST_UNSENT = 16 * 1024
"""Unsent bytes for a client above which writing pauses; the kernel buffers more."""
FEW_PIECES, LEAST_PIECE = 1024, 256
"""A body of more than `FEW_PIECES` chunks must average at least `LEAST_PIECE` bytes per chunk."""
FORM_RATE = 16 * 1024
"""Minimum rate of an uploaded form in bytes per second; a large file may need longer than any fixed time."""
MOST_HEADERS = 256
"""Maximum number of headers; a small header costs as much time as a large one."""
MOST_PIPELINED = 16
"""Requests on one connection that wait for the reply to an earlier one."""
_LINE = re.compile(rb"[A-Z-]+ [^ ]+ HTTP/1\.[01]\r\n")


class _Refusal(Exception):
    """Carries an error out of the parser, which is in the middle of a callback."""

    def __init__(self, error: DragomanError) -> None:
        self.error = error


class StrictProtocol(HttpToolsProtocol):
    """One connection. Invalid bytes get an error in the API's format, and end it."""

    transport: LingeringTransport

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.url = b""
        app: Any = config.app
        self._settings: Settings = app.settings
        self._host: AppState = app.host
        self.counted: CountedConnection | None = None
        """Set by TLS, which counts the connection before the handshake."""
        self._stage: Stage = "idle"
        self._number = 0
        """Number of the message being read, so that each has its own deadlines."""
        self._head_bytes = 0
        self._raw_bytes = 0
        """Bytes read since the parser's last callback."""
        self._line = b""
        """The request line, while it is incomplete."""
        self._pieces = self._body_bytes = 0
        self._seen_bytes = 0
        """Body bytes when its deadline was last extended."""
        self._unread = 0
        self._deaf = False
        self._running: RequestResponseCycle | None = None
        times: dict[Stage, float] = {
            "head": self._settings.header_timeout,
            "body": self._settings.body_timeout,
        }
        self._deadline = ReadTimeout(self.loop, times, self._late)
        self._stall: WriteTimeout
        self._accept: bytes | None = None
        """The reply to the key of a WebSocket handshake, if the request is one."""

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=MOST_UNSENT)
        patient = LingeringTransport(transport, self._mid_request, self._settings.write_timeout)
        self._stall = WriteTimeout(self.loop, patient, self._settings.write_timeout)
        super().connection_made(patient)
        if self.counted is None:
            self.counted = self._host.connections.enter(patient.abort)
        else:
            self.counted.become(patient.abort)
        if self.counted is None:
            self.connections.discard(self)
            self._say(Unavailable("The server has reached its limit of connections; retry soon."))
        else:
            self._deadline.watch("head", self._number)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.let_go()
        self._stall.end()
        self.transport.lost()
        if self.counted is not None:
            self.counted.leave()
        # uvicorn notifies only the last of several requests.
        for cycle in (self._running, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            self._discard(len(data))
            return
        self._unset_keepalive_if_required()
        self._raw_bytes += len(data)
        try:
            if self._stage == "idle" or self._line:
                self._check_line(data)
            self.parser.feed_data(data)
            if self._raw_bytes > self._settings.limits.header_bytes and self._stage != "idle":
                raise _Refusal(self._head_too_large())
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
            return
        except (httptools.HttpParserError, _Refusal) as error:
            # An exception in a callback leaves the parser as the parser's own error.
            cause = error if isinstance(error, _Refusal) else error.__context__
            dragoman_error = (
                cause.error if isinstance(cause, _Refusal) else _invalid("Not a valid HTTP request.")
            )
            self._refuse(dragoman_error)
            return
        waits = "head" if self._stage == "idle" and not self._answering() else self._stage
        self._deadline.watch(waits, self._number)

    def _check_line(self, data: bytes) -> None:
        """Check the request line: the parser accepts extra spaces and protocols other than HTTP."""
        line = self._line + data if self._line else data
        if line[0] in b"\r\n":
            line = line.lstrip(b"\r\n")
        end = line.find(b"\n") + 1
        self._line = b"" if end else line
        if end and not _LINE.fullmatch(line, 0, end):
            raise _Refusal(_invalid("The first line is not a valid HTTP/1.1 request line."))

    def _discard(self, count: int) -> None:
        self._unread += count
        if self._unread > MOST_UNREAD:
            self.transport.abort()

    def _upgrade(self, rest: bytes) -> None:
        """Handle the end of the head of an upgrade request; `rest` are the bytes after it."""
        self._deadline.stop()
        self._stage = "idle"
        if self._accept is None:
            # The connection stays HTTP/1.1; the other bytes are for another protocol.
            self._stop_listening()
        elif self._answering() or self.counted is None:
            self.transport.abort()
        else:
            self._become_socket(self._accept, self.counted, rest)

    def _become_socket(self, accept: bytes, counted: CountedConnection, rest: bytes) -> None:
        url = httptools.parse_url(self.url)
        scope = self.scope | {
            "type": "websocket",
            "scheme": "wss" if self.scheme == "https" else "ws",
            "path": unquote(url.path.decode("ascii")),
            "raw_path": url.path,
            "query_string": url.query or b"",
            "subprotocols": [],
            "extensions": {"websocket.http.response": {}},
        }
        protocol = WebSocketProtocol(
            self.app,
            scope,
            accept,
            self.transport,
            self._stall,
            counted,
            turnstile=self._host.frame_scheduler,
            bodies=self._host.bodies,
            most_bytes=self._settings.limits.body_bytes,
            writable=not self.flow.write_paused,
            default_headers=self.server_state.default_headers,
            over=self.connections.discard,
        )
        connections: set[Any] = self.connections
        connections.discard(self)
        connections.add(protocol)
        self.transport.set_protocol(protocol)
        task = self.loop.create_task(protocol.run())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        if rest:
            protocol.take(rest)
        # The socket's protocol receives all further bytes.
        self._deadline.let_go()
        self.parser = None  # type: ignore[assignment]

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stage = "head"
        self._number += 1
        self._head_bytes = self._pieces = self._body_bytes = self._seen_bytes = self._unread = 0
        self._accept = None
        self.scope["dragoman.connection"] = self.counted  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        # A header after the body is a trailer, which must not be treated as a header.
        if self._stage == "head":
            super().on_header(name, value)
            if len(self.headers) > MOST_HEADERS:
                raise _Refusal(
                    HeadersTooLarge(f"The request has more than {MOST_HEADERS} headers; send fewer.")
                )

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if self.url[:1] != b"/" or version not in ("1.0", "1.1"):
            raise _Refusal(
                _invalid("The request target must be a path that begins with /, in HTTP/1.0 or 1.1.")
            )
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or version == "1.0"):
            raise _Refusal(_invalid("The only supported Transfer-Encoding is chunked, in HTTP/1.1."))
        if len(self.pipeline) >= MOST_PIPELINED:
            raise _Refusal(_invalid("Too many pipelined requests; wait for the replies to earlier ones."))
        if self.parser.should_upgrade() and self._should_upgrade():
            self._check_handshake(version)
            return
        super().on_headers_complete()
        if self.counted is not None:
            self.counted.mark_busy()
        # uvicorn would pause reading until this request's turn, and not notice that the client disconnected.
        self.flow.resume_reading()
        self._stage = "body"
        self._raw_bytes = 0

    def _should_upgrade(self) -> bool:
        return self._get_upgrade() == b"websocket"

    def _check_handshake(self, version: str) -> None:
        method = self.parser.get_method().decode("ascii")
        self.scope["method"] = method
        try:
            self._accept = accept_handshake(method, version, self.headers)
        except DragomanError as error:
            raise _Refusal(error) from None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.counted is not None and not self._answering():
            self.counted.mark_idle()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._raw_bytes = 0
        self._pieces += 1
        self._body_bytes += len(body)
        if self._pieces > FEW_PIECES and self._body_bytes < LEAST_PIECE * self._pieces:
            raise _Refusal(BodyTooLarge("The body has too many small chunks; send larger ones."))
        if self.cycle.response_complete:
            self._discard(len(body))
        elif self.cycle is not self._running and self._body_bytes > MOST_UNREAD:
            raise _Refusal(
                BodyTooLarge(
                    "The body of a pipelined request is too large; wait for the reply to the earlier request."
                )
            )
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._accept is None:
            super().on_message_complete()
        self._stage = "idle"
        self._raw_bytes = 0

    def _count(self, count: int) -> None:
        # The colon, the space and the line end are not passed to callbacks.
        self._head_bytes += count + 4
        if self._head_bytes > self._settings.limits.header_bytes:
            raise _Refusal(self._head_too_large())

    def _head_too_large(self) -> DragomanError:
        return HeadersTooLarge(
            f"The request line and headers are larger than {self._settings.limits.header_bytes} bytes."
        )

    # Timeouts.

    def _late(self, stage: Stage) -> None:
        if stage == "head" and self._answering():
            # It cannot be answered before the request ahead of it.
            self._deadline.watch(stage, self._number)
        elif stage == "body" and self._comes_on():
            self._seen_bytes = self._body_bytes
            self._deadline.watch(stage, self._number)
        elif not self._number:
            self.transport.close()
        else:
            self._refuse(RequestTimeout(f"The {stage} of the request did not arrive in time."))

    def _comes_on(self) -> bool:
        """Return whether the body is a form that arrives at the minimum rate."""
        least = FORM_RATE * self._settings.body_timeout
        is_form = any(name == b"content-type" and value.startswith(MEDIA) for name, value in self.headers)
        return is_form and self._body_bytes - self._seen_bytes >= least

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall.end()

    # Errors.

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _mid_request(self) -> bool:
        return self._deaf or self._stage != "idle"

    def _stop_listening(self) -> None:
        self._deaf = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _refuse(self, error: DragomanError) -> None:
        """Send the error, unless a reply is being sent, and end the connection."""
        self._deadline.stop()
        if self._stage == "body":
            self._refuse_body(error)
        elif self._answering():
            self._stop_listening()
        else:
            self._deaf = True
            self._say(error)

    def _refuse_body(self, error: DragomanError) -> None:
        """Reject a body whose request the app is already handling."""
        self._deaf = True
        cycle = self.cycle
        if cycle.response_complete:
            self.transport.close()
            return
        cycle.disconnected = True
        cycle.message_event.set()
        if cycle.response_started or cycle is not self._running:
            self.transport.abort()
        else:
            self._say(error)

    def _say(self, error: DragomanError) -> None:
        # For an incomplete head, the received part of the path.
        path = unquote(self.url.partition(b"?")[0].decode("latin-1"))
        path = path.removeprefix(self._settings.root_path)
        body = msgspec.json.encode(errors_at(path).body(error))
        self.transport.write(_reply(error, body, self.server_state.default_headers))
        self.transport.close()


def _invalid(message: str) -> BadRequest:
    return BadRequest(message, code="invalid_http")


def _reply(error: DragomanError, body: bytes, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    headers = [
        *default_headers,
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        *([(b"sec-websocket-version", VERSION)] if error.code == "invalid_handshake" else []),
        *([(b"retry-after", b"%d" % error.retry_after)] if error.retry_after is not None else []),
    ]
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
    return status + b"".join(b"%s: %s\r\n" % header for header in headers) + b"\r\n" + body
