"""Connections to an upstream, and the data that they receive for one request.

A token must be cheap here, since this process may relay those of many servers. So there is no task and no
buffer between the socket and the sink of a job: data is parsed where the event loop reads it, only the fields
that a step needs are decoded, and connections are reused.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from ssl import SSLContext
from typing import cast
from urllib.parse import urlsplit

import httptools
import httpx
import msgspec
from msgspec.structs import replace

from dragoman.client.config import UNIX, ClientConfig, headers_of
from dragoman.client.errors import (
    MOST_SAID,
    BrokenStreamError,
    ClientError,
    ClientTimeout,
    ClosedWithoutReply,
    ConnectionFailed,
    ErrorContext,
    Reply,
    StatusError,
    StreamError,
    show_value,
)
from dragoman.client.reply_reader import DONE, LONGEST, EventTooLong, SseReader
from dragoman.client.request import STREAM, Request
from dragoman.client.wire import problem_in, problem_of
from dragoman.engines.remote.stream_reader import StreamStepReader
from dragoman.errors import DragomanError
from dragoman.types import Step

# One request, and what was received for it.


class UpstreamCall:
    """One streaming request. `sink` gets the steps. `ended` is called once: with None after the last step,
    else with the error.
    """

    def __init__(
        self,
        setup: ClientConfig,
        request: Request,
        hearing: StreamStepReader,
        sink: Callable[[Step], None],
        ended: Callable[[DragomanError | None], None],
    ) -> None:
        self.hearing = hearing
        self.content = _write_request(setup, request)
        self.over = False
        """Whether it has ended or was cancelled."""
        self.line: UpstreamConnection | None = None
        self._setup = setup
        self._sink = sink
        self._ended = ended
        self._reply: Reply | None = None
        self._sse: SseReader | None = None
        self._whole = bytearray()
        self._where = ErrorContext(f"POST {setup.url}{request.path}")

    def cancel(self) -> None:
        self.over = True
        if self.line is not None:
            self.line.hang_up()

    def fail(self, problem: DragomanError) -> None:
        if not self.over:
            self.over = True
            self._ended(problem)

    @property
    def begun(self) -> bool:
        """Whether the head of the reply was received."""
        return self._reply is not None

    # Events of the connection.

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self._reply = reply = Reply.told(status, headers)
        self._where = ErrorContext(self._where.request, status, reply.request_id)
        self._sse = SseReader() if reply.streams and status < 300 else None

    def feed(self, data: bytes) -> None:
        if self.over:
            return
        if self._sse is None:
            self._collect(data)
            return
        try:
            for event in self._sse.feed(data):
                self._hear(event.data, event.name)
        except EventTooLong as error:
            self._break(str(error), data)

    def _collect(self, data: bytes) -> None:
        assert self._reply is not None
        room = (LONGEST if self._reply.status < 300 else MOST_SAID) - len(self._whole)
        self._whole += data[: max(room, 0)]

    def _hear(self, data: bytes, name: bytes) -> None:
        if self.over:
            return
        if data == DONE or data.strip() == DONE:
            self._finish()
            return
        try:
            if name == b"error" or b'"error"' in data:
                self._check_failed(data, name)
            step = self.hearing.read_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            why = str(error) if isinstance(error, msgspec.ValidationError) else "it is not JSON"
            self._break(f"An event cannot be read: {why}.", data)
        except DragomanError as error:
            self._drop(error)
        else:
            if step is not None:
                self._sink(step)

    def _check_failed(self, data: bytes, name: bytes) -> None:
        result = msgspec.json.decode(data)
        error = result.get("error") if isinstance(result, dict) else None
        if error is not None or name == b"error":
            problem = problem_of(error) or problem_in(data)
            text = problem.message if problem else "The server sent an error without a message."
            raise StreamError(text, self._at(b"" if problem else data), problem)

    def _finish(self) -> None:
        """End the answer; the rest of the reply is ignored."""
        if self.over:
            return
        try:
            step = self.hearing.last()
        except DragomanError as error:
            self._drop(error)
            return
        self.over = True
        self._sink(step)
        self._ended(None)

    def done(self) -> None:
        """Handle the end of the reply."""
        if self.over or self._reply is None:
            return
        if self._reply.status >= 300:
            body = bytes(self._whole)
            problem = problem_in(body)
            self.fail(StatusError(self._where if problem else self._at(body), problem, self._reply))
            return
        if self._sse is None:
            # Not a stream, it seems: a whole answer has the form of a last chunk.
            self._hear(bytes(self._whole), b"")
        else:
            for event in self._sse.end():
                self._hear(event.data, event.name)
        if not self.over:
            self._end_early(
                BrokenStreamError("The stream ended before the answer did.", self._at(self._whole))
            )

    def on_disconnect(self) -> None:
        """Handle the loss of the connection."""
        if self._reply is None:
            self.fail(
                ClosedWithoutReply(
                    f"The server at {self._setup.url} closed the connection without a reply.", self._where
                )
            )
        elif not self.over:
            message = f"The server at {self._setup.url} closed the connection during an answer."
            self._end_early(BrokenStreamError(message, self._where))

    def _end_early(self, problem: ClientError) -> None:
        """End a broken answer: if the finish was received, nothing of the answer is missing."""
        if self.hearing.finished:
            self._finish()
        else:
            self.fail(problem)

    def time_out(self) -> None:
        self._drop(
            ClientTimeout(f"The server at {self._setup.url} has been silent for too long.", self._where)
        )

    def _break(self, message: str, data: bytes) -> None:
        self._drop(BrokenStreamError(message, self._at(data)))

    def _drop(self, problem: DragomanError) -> None:
        if self.line is not None:
            self.line.hang_up()
        self.fail(problem)

    def _at(self, data: bytes | bytearray) -> ErrorContext:
        beginning = self._setup.redact(show_value(data))
        return replace(self._where, beginning=beginning)


def _write_request(setup: ClientConfig, request: Request) -> bytes:
    body = msgspec.json.encode(request.body)
    parts = urlsplit("http://localhost" if setup.url.startswith(UNIX) else setup.url)
    fields = {"Host": parts.netloc.rpartition("@")[2], **headers_of(setup.key), **STREAM, **request.headers}
    # Values from a client's request must not inject header lines.
    lines = [f"{name}: {value}" for name, value in fields.items() if value.isascii() and value.isprintable()]
    head = [f"POST {parts.path}{request.path} HTTP/1.1", *lines, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(head).encode() + body


# Connections.


_REST_S = 1.0
"""Seconds for the end of a reply whose last event was received."""
MOST_IDLE = 64
_KEEP_ASKING = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
)
"""TCP keepalive: after 15 idle seconds a probe every 5 seconds; three without a reply close the
connection.
"""
MOST_HEAD = 64 * 1024


class UpstreamConnection(asyncio.Protocol):
    """One connection, and the call that uses it."""

    def __init__(self, lines: "ConnectionPool") -> None:
        self._lines = lines
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._size = 0
        self.call: UpstreamCall | None = None
        self.heard = 0.0
        self.used = False
        """Whether it has completed a request before."""

    def send(self, call: UpstreamCall) -> None:
        assert self._transport is not None
        self.call, call.line = call, self
        self.heard, self._headers, self._size = self._loop.time(), {}, 0
        self._lines.busy.add(self)
        self._transport.write(call.content)

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def check(self, silence: float) -> None:
        if self.call is not None and self._loop.time() - self.heard > (
            _REST_S if self.call.over else silence
        ):
            self.call.time_out()
            self.hang_up()

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not by isinstance: uvloop's transports are not of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        used = transport.get_extra_info("socket")
        if used is not None and used.family != socket.AF_UNIX:
            # A dead network path sends nothing, and neither does a busy server: so the kernel has to probe.
            for level, option, value in _KEEP_ASKING:
                used.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        if self.call is None:
            # Unexpected data on an idle connection.
            self.hang_up()
            return
        try:
            self._parser.feed_data(data)
        except Exception as error:
            if self.call is not None:
                where = self.call._at(data)
                self.call.fail(BrokenStreamError(f"The reply cannot be read: {type(error).__name__}.", where))
            self.hang_up()

    def connection_lost(self, error: Exception | None) -> None:
        call, self.call, self._transport = self.call, None, None
        self._lines.forget(self)
        if call is None:
            return
        if self.used and not self._size and not self._headers and not call.over:
            # An idle connection was closed; that says nothing about the server.
            self._lines.ask(call, fresh=True)
        elif call.begun and not error and not self._has_end():
            call.done()
        else:
            call.on_disconnect()
        call.line = None if call.line is self else call.line

    def _has_end(self) -> bool:
        """Whether the reply's length is known: then the end of the connection is not the end of the reply."""
        return "transfer-encoding" in self._headers or "content-length" in self._headers

    # Callbacks of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value)
        if self._size > MOST_HEAD:
            raise ValueError("The header of the reply is too long.")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.call is not None and status >= 200:
            self.call.on_head(status, self._headers)
        elif status < 200:
            self._headers = {}

    def on_body(self, body: bytes) -> None:
        if self.call is not None:
            self.call.feed(body)

    def on_message_complete(self) -> None:
        call = self.call
        if call is None or self._parser.get_status_code() < 200:
            return
        call.done()
        self.call, call.line, self.used = None, None, True
        self._lines.release(self, keep=self._parser.should_keep_alive())


class ConnectionPool:
    """The connection pool of one upstream. It belongs to the event loop in which it is first used."""

    def __init__(self, setup: ClientConfig, silence_s: float) -> None:
        self.setup = setup
        self.busy: set[UpstreamConnection] = set()
        self._silence_s = silence_s
        self._idle: list[UpstreamConnection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._secure: SSLContext | None = None

    def ask(self, call: UpstreamCall, *, fresh: bool = False) -> None:
        """Send a call on an idle connection, or on a new one."""
        if self._sweep is None:
            self._arm()
        if self._idle and not fresh:
            # The newest: the others may stay idle until the server closes them.
            self._idle.pop().send(call)
            return
        task = asyncio.get_running_loop().create_task(self._open(call))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, call: UpstreamCall) -> None:
        try:
            async with asyncio.timeout(self.setup.timeouts.connect):
                line = await self._connect()
        except (OSError, TimeoutError):
            call.fail(ConnectionFailed(f"Nothing answers at {self.setup.url}.", call._at(b"")))
            return
        if call.over:
            self._idle.append(line)
        else:
            line.send(call)

    async def _connect(self) -> UpstreamConnection:
        loop, url = asyncio.get_running_loop(), self.setup.url
        if url.startswith(UNIX):
            return (
                await loop.create_unix_connection(lambda: UpstreamConnection(self), url.removeprefix(UNIX))
            )[1]
        parts = urlsplit(url)
        if parts.scheme == "https" and self._secure is None:
            self._secure = httpx.create_ssl_context()
        port = parts.port or (443 if parts.scheme == "https" else 80)
        host = parts.hostname or ""
        return (await loop.create_connection(lambda: UpstreamConnection(self), host, port, ssl=self._secure))[
            1
        ]

    def release(self, line: UpstreamConnection, *, keep: bool) -> None:
        self.busy.discard(line)
        if keep and len(self._idle) < MOST_IDLE:
            self._idle.append(line)
        else:
            line.hang_up()

    def forget(self, line: UpstreamConnection) -> None:
        self.busy.discard(line)
        with suppress(ValueError):
            self._idle.remove(line)

    def close(self) -> None:
        for task in self._opening:
            task.cancel()
        for line in [*self._idle, *self.busy]:
            line.hang_up()
        self._idle.clear()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _arm(self) -> None:
        pause = min(_REST_S, self._silence_s / 4)
        self._sweep = asyncio.get_running_loop().call_later(pause, self._look)

    def give_up(self, silence_s: float) -> None:
        """End calls that have been silent for this long as if the connection were lost."""
        for line in [*self.busy]:
            line.check(silence_s)

    def _look(self) -> None:
        """Check all connections with one timer, instead of one timer per received chunk."""
        self.give_up(self._silence_s)
        self._sweep = None
        if self.busy or self._opening:
            self._arm()
