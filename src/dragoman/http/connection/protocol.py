"""HTTP on a connection: deadlines, caps, and nothing that two readers could read in two ways.

httptools reads the bytes and calls `on_...` for each part of a message; uvicorn's protocol, which this one
goes on from, makes a request of them and has the app answer it. What is added comes before that: what is
wrong leaves the parser as a `_Refusal`, is said in the words of the API that the path belongs to, and ends
the connection, since nobody can tell where the next message would begin. A connection is idle, in a head or
in a body, and each of the latter two has a deadline.
"""

import asyncio
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools
import msgspec

from dragoman.api.multipart import MEDIA
from dragoman.errors import BadRequest, BodyTooLarge, DragomanError, HeadTooLarge, TooSlow, Unavailable
from dragoman.http.connection.limiter import CountedConnection
from dragoman.http.connection.transport import Deadline, PatientTransport, Stage, Stall
from dragoman.http.connection.upgrade import VERSION, SocketProtocol, accept_handshake
from dragoman.http.connection.uvicorn_parts import (
    ASGI3Application,
    Config,
    HttpToolsProtocol,
    RequestResponseCycle,
    ServerState,
)
from dragoman.http.routes.table import errors_at
from dragoman.settings import Settings

if TYPE_CHECKING:
    from dragoman.http.host import Host

MOST_UNREAD = 64 * 1024
"""Bytes of a body that are still taken after its answer, or its refusal, was sent."""
MOST_UNSENT = 16 * 1024
"""Bytes that wait for a client before nothing more is written to it. The system keeps some as well."""
FEW_PIECES, LEAST_PIECE = 1024, 256
"""Beyond so many pieces of a body they have so many bytes on average."""
FORM_RATE = 16 * 1024
"""Bytes a second at which a form with a file has to come; it may be too long for any fixed time."""
MOST_HEADERS = 256
"""Each costs as much as a large one."""
MOST_PIPELINED = 16
"""Requests on one connection that wait for the answer to the one before."""
_LINE = re.compile(rb"[A-Z-]+ [^ ]+ HTTP/1\.[01]\r\n")


class _Refusal(Exception):
    """Leaves the parser, which is in the middle of a callback."""

    def __init__(self, error: DragomanError) -> None:
        self.error = error


class StrictProtocol(HttpToolsProtocol):
    """One connection. What is wrong with its bytes is said as any error is, and ends it."""

    transport: PatientTransport

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
        self._host: Host = app.host
        self.counted: CountedConnection | None = None
        """Given by who has counted it before there was anything to be said on it."""
        self._stage: Stage = "idle"
        self._number = 0
        """Of the message that is being read, so that each has deadlines of its own."""
        self._head_bytes = 0
        self._raw_bytes = 0
        """Read since the parser last gave us something."""
        self._line = b""
        """The first line of a request, as long as it is not all there."""
        self._pieces = self._body_bytes = 0
        self._seen_bytes = 0
        """Of the body, when its deadline was last put off."""
        self._unread = 0
        self._deaf = False
        self._running: RequestResponseCycle | None = None
        times: dict[Stage, float] = {
            "head": self._settings.header_timeout,
            "body": self._settings.body_timeout,
        }
        self._deadline = Deadline(self.loop, times, self._late)
        self._stall: Stall
        self._accept: bytes | None = None
        """The answer to the key of a handshake, where the request is one."""

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=MOST_UNSENT)
        patient = PatientTransport(transport, self._mid_request, self._settings.write_timeout)
        self._stall = Stall(self.loop, patient, self._settings.write_timeout)
        super().connection_made(patient)
        if self.counted is None:
            self.counted = self._host.connections.enter(patient.abort)
        else:
            self.counted.become(patient.abort)
        if self.counted is None:
            self.connections.discard(self)
            self._say(Unavailable("The server has as many connections as it takes; try again soon."))
        else:
            self._deadline.watch("head", self._number)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.let_go()
        self._stall.end()
        self.transport.lost()
        if self.counted is not None:
            self.counted.leave()
        # uvicorn tells only the last of several requests.
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
            # What a callback raises comes out as the parser's own error.
            cause = error if isinstance(error, _Refusal) else error.__context__
            said = cause.error if isinstance(cause, _Refusal) else _invalid("This is no valid HTTP request.")
            self._refuse(said)
            return
        waits = "head" if self._stage == "idle" and not self._answering() else self._stage
        self._deadline.watch(waits, self._number)

    def _check_line(self, data: bytes) -> None:
        """The parser forgives spaces, and protocols other than HTTP."""
        line = self._line + data if self._line else data
        if line[0] in b"\r\n":
            line = line.lstrip(b"\r\n")
        end = line.find(b"\n") + 1
        self._line = b"" if end else line
        if end and not _LINE.fullmatch(line, 0, end):
            raise _Refusal(_invalid("The first line is not that of an HTTP/1.1 request."))

    def _discard(self, count: int) -> None:
        self._unread += count
        if self._unread > MOST_UNREAD:
            self.transport.abort()

    def _upgrade(self, rest: bytes) -> None:
        """The head is over; `rest` stands behind it."""
        self._deadline.stop()
        self._stage = "idle"
        if self._accept is None:
            # We stay with HTTP/1.1; what else was sent is meant for another protocol.
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
        protocol = SocketProtocol(
            self.app,
            scope,
            accept,
            self.transport,
            self._stall,
            counted,
            turnstile=self._host.turnstile,
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
        # Nothing comes here any more.
        self._deadline.let_go()
        self.parser = None  # type: ignore[assignment]

    # The parser's callbacks

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
        # Behind a body it is a trailer, which may not pass for a header.
        if self._stage == "head":
            super().on_header(name, value)
            if len(self.headers) > MOST_HEADERS:
                raise _Refusal(HeadTooLarge(f"The head has more than {MOST_HEADERS} headers."))

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if self.url[:1] != b"/" or version not in ("1.0", "1.1"):
            raise _Refusal(_invalid("Ask for a path, which begins with /, in HTTP/1.1."))
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or version == "1.0"):
            raise _Refusal(_invalid("A body may come in chunks, and in no other coding."))
        if len(self.pipeline) >= MOST_PIPELINED:
            raise _Refusal(_invalid("Wait for the answers to the requests before."))
        if self.parser.should_upgrade() and self._should_upgrade():
            self._check_handshake(version)
            return
        super().on_headers_complete()
        if self.counted is not None:
            self.counted.works()
        # uvicorn would read nothing more before its turn comes, and so not hear that the client has left.
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
            self.counted.rests()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._raw_bytes = 0
        self._pieces += 1
        self._body_bytes += len(body)
        if self._pieces > FEW_PIECES and self._body_bytes < LEAST_PIECE * self._pieces:
            raise _Refusal(BodyTooLarge("The body comes in too many pieces; send larger chunks."))
        if self.cycle.response_complete:
            self._discard(len(body))
        elif self.cycle is not self._running and self._body_bytes > MOST_UNREAD:
            raise _Refusal(BodyTooLarge("Wait for the answer before, and send the body then."))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._accept is None:
            super().on_message_complete()
        self._stage = "idle"
        self._raw_bytes = 0

    def _count(self, count: int) -> None:
        # The colon, the space and the end of the line are not given to us.
        self._head_bytes += count + 4
        if self._head_bytes > self._settings.limits.header_bytes:
            raise _Refusal(self._head_too_large())

    def _head_too_large(self) -> DragomanError:
        return HeadTooLarge(f"The head is larger than {self._settings.limits.header_bytes} bytes.")

    # Patience

    def _late(self, stage: Stage) -> None:
        if stage == "head" and self._answering():
            # It cannot be answered before the one before it.
            self._deadline.watch(stage, self._number)
        elif stage == "body" and self._comes_on():
            self._seen_bytes = self._body_bytes
            self._deadline.watch(stage, self._number)
        elif not self._number:
            self.transport.close()
        else:
            self._refuse(TooSlow(f"The {stage} of the request was not there in time."))

    def _comes_on(self) -> bool:
        """Whether this is a form, of which enough has come since the last look."""
        least = FORM_RATE * self._settings.body_timeout
        is_form = any(name == b"content-type" and value.startswith(MEDIA) for name, value in self.headers)
        return is_form and self._body_bytes - self._seen_bytes >= least

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall.end()

    # Refusals

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _mid_request(self) -> bool:
        return self._deaf or self._stage != "idle"

    def _stop_listening(self) -> None:
        self._deaf = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _refuse(self, error: DragomanError) -> None:
        """Says so where nothing else is being said, and ends the connection."""
        self._deadline.stop()
        if self._stage == "body":
            self._refuse_body(error)
        elif self._answering():
            self._stop_listening()
        else:
            self._deaf = True
            self._say(error)

    def _refuse_body(self, error: DragomanError) -> None:
        """Of a request that is being answered already."""
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
        # Of a head that is not whole, what there is of the path.
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
