"""WebSocket on a connection: validates handshakes, and limits the cost of frames.

The HTTP parser of all requests reads the head of a handshake, which is answered here. The sans-I/O part of
`websockets` parses the frames, a chunk at a time: all sockets together have a few milliseconds in each turn
of the event loop. Reading pauses while a client's last message waits for the app, or while the client does
not read. Nothing is compressed.
"""

import asyncio
import base64
import binascii
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from hashlib import sha1
from http import HTTPStatus
from typing import Any

from starlette.types import Message, Scope
from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from dragoman.errors import BadRequest, DragomanError
from dragoman.http.admission import ByteBudget
from dragoman.http.connection.limiter import CountedConnection
from dragoman.http.connection.transport import LingeringTransport, WriteTimeout

logger = logging.getLogger("dragoman.http")
# Disabled, because it would log data sent by clients.
_silent = logging.getLogger("dragoman.http.frames")
_silent.setLevel(logging.CRITICAL + 1)

VERSION = b"13"
_ACCEPTS = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
READ_BYTES = 16 * 1024
"""Bytes read from the kernel at once, and buffered until they are parsed."""
SENT_BYTES = 256 * 1024
"""Maximum bytes of a frame sent; a longer message has several."""
CHUNK_BYTES = 2048
"""Bytes parsed for one socket in its turn: at most 350 frames."""
TURN_S = 0.002
"""Seconds that the frames of all sockets may take from the event loop; then other work has as long."""
MOST_MESSAGES = 8
"""Messages of all sockets that are passed to their apps in one turn."""
FEW_FRAMES, LEAST_FRAME = 256, 256
"""A message of more than `FEW_FRAMES` frames must average at least `LEAST_FRAME` bytes per frame."""
MOST_CONTROLS, CONTROLS_S = 16, 10.0
"""Maximum number of pings and pongs within this many seconds."""
PING_S = 20.0
"""Seconds of silence after which a client gets a ping; it has as long to answer."""
MOST_UNREAD = 64 * 1024
"""Bytes that are still read after the close frame was sent."""


def accept_handshake(method: str, version: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the server's answer to the key of a handshake; raise if the handshake is invalid."""
    if method != "GET" or version != "1.1":
        raise _invalid("A WebSocket handshake must be a GET in HTTP/1.1.")
    if any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in headers
    ):
        raise _invalid("A WebSocket handshake must not have a body.")
    if _only(headers, b"sec-websocket-version") != VERSION:
        raise _invalid("The request must have one Sec-WebSocket-Version, with the value 13.")
    key = _only(headers, b"sec-websocket-key")
    try:
        nonce = base64.b64decode(key, validate=True)
    except binascii.Error:
        nonce = b""
    if len(nonce) != 16:
        raise _invalid("The request must have one Sec-WebSocket-Key, of 16 bytes in base64.")
    return base64.b64encode(sha1(key + _ACCEPTS, usedforsecurity=False).digest())


def _only(headers: Sequence[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    values = [value for name, value in headers if name == wanted]
    return values[0].strip() if len(values) == 1 else b""


def _invalid(message: str) -> BadRequest:
    return BadRequest(message, code="invalid_handshake")


class FrameScheduler:
    """Parses the input of all sockets in turns, a chunk each, and lets the event loop run in between."""

    def __init__(self) -> None:
        self.given = 0
        """Number of messages passed to apps in this turn."""
        self.buffer = memoryview(bytearray(READ_BYTES))
        """The read buffer of all sockets, used by one after another."""
        self._waiting: deque[Callable[[], bool]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def add(self, step: Callable[[], bool]) -> None:
        """Add a step; `step()` does a little, and returns whether there is more."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.append(step)

    def _turn(self) -> None:
        until = time.perf_counter() + TURN_S
        self.given = 0
        while self._waiting and self.given < MOST_MESSAGES and time.perf_counter() < until:
            step = self._waiting[0]
            if step():
                self._waiting.append(step)
            self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_later(TURN_S, self._turn)


class WebSocketProtocol(asyncio.BufferedProtocol):
    """A WebSocket after its handshake. `app` is an ASGI app."""

    def __init__(
        self,
        app: Callable[..., Coroutine[Any, Any, None]],
        scope: Scope,
        accept: bytes,
        transport: LingeringTransport,
        stall: WriteTimeout,
        counted: CountedConnection,
        *,
        turnstile: FrameScheduler,
        bodies: ByteBudget,
        most_bytes: int,
        writable: bool,
        default_headers: list[tuple[bytes, bytes]],
        over: Callable[["WebSocketProtocol"], None],
    ) -> None:
        self.transport = transport
        self._loop = asyncio.get_running_loop()
        self._app = app
        self._scope = scope
        self._accept = accept
        self._stall = stall
        self._counted = counted
        self._turnstile = turnstile
        self._bodies = bodies
        self._held = bodies.reserve("")
        """The bytes of the incomplete message."""
        self._default_headers = default_headers
        self._over = over
        self._frames = ServerProtocol(state=State.OPEN, max_size=most_bytes, logger=_silent)
        self._raw, self._at = b"", 0
        """Bytes read, and how many of them were parsed."""
        self._steps = self._paused = False
        self._fragments: list[bytes] = []
        self._count = self._size = 0
        self._controls, self._controls_since = 0, 0.0
        self._inbox: deque[bytes] = deque()
        self._came = asyncio.Event()
        """Set when the app may take a message, or learn that there are no more."""
        self._news: Message = {"type": "websocket.connect"}
        self._came.set()
        self._speaking = asyncio.Lock()
        self._writable = asyncio.Event()
        if writable:
            self._writable.set()
        self._open = self._gone = False
        self._refusal: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self._heard, self._asked = True, False
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0
        transport.mid_request = lambda: self._frames.close_rcvd is None

    async def run(self) -> None:
        """Run the app and end the connection."""
        try:
            await self._app(self._scope, self._receive, self._send)
        except OSError:
            pass  # The client disconnected.
        except Exception:
            logger.exception("WebSocket failed")
            self._end(CloseCode.INTERNAL_ERROR)
        else:
            self._end(CloseCode.NORMAL_CLOSURE)

    # Input.

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._turnstile.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.take(bytes(self._turnstile.buffer[:nbytes]))

    def take(self, data: bytes) -> None:
        self._heard, self._asked = True, False
        if self._gone or self.transport.is_closing():
            self._unread += len(data)
            if self._unread > MOST_UNREAD:
                self.transport.abort()
            return
        self._raw, self._at = (self._raw[self._at :] + data if self._raw else data), 0
        self._go_on()

    def _go_on(self) -> None:
        """Schedule the next message or chunk; reading pauses until then."""
        if self._may_step() and not self._steps:
            self._steps = True
            self._turnstile.add(self._step)
        self._pause(bool(self._raw) or bool(self._inbox) or not self._writable.is_set())

    def _may_step(self) -> bool:
        if self._gone or not self._open or not self._writable.is_set():
            return False
        return not self._came.is_set() if self._inbox else bool(self._raw)

    def _pause(self, pauses: bool) -> None:
        if pauses != self._paused and not self.transport.is_closing():
            self._paused = pauses
            if pauses:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _step(self) -> bool:
        if self._may_step():
            if self._inbox:
                self._turnstile.given += 1
                self._came.set()
            else:
                self._read_piece()
        self._steps = self._may_step()
        if not self._steps:
            self._go_on()
        return self._steps

    def _read_piece(self) -> None:
        piece = self._raw[self._at : self._at + CHUNK_BYTES]
        self._at += len(piece)
        self._size += len(piece)
        if self._at == len(self._raw):
            self._raw = b""
        self._frames.receive_data(piece)
        for frame in self._frames.events_received():
            if isinstance(frame, Frame) and not self._gone:
                self._take(frame)
        self._hold()
        self._flush()

    def _take(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.PING, Opcode.PONG):
            self._take_control()
        elif frame.opcode is Opcode.CLOSE:
            self._leave(self._frames.close_rcvd.code if self._frames.close_rcvd else 1005)
        else:
            self._count += 1
            if frame.data:
                self._fragments.append(bytes(frame.data))
            if frame.fin:
                whole = self._fragments[0] if len(self._fragments) == 1 else b"".join(self._fragments)
                self._fragments, self._count, self._size = [], 0, 0
                self._inbox.append(whole)
            elif self._count > FEW_FRAMES and self._size < LEAST_FRAME * self._count:
                self._fail(CloseCode.MESSAGE_TOO_BIG, "the message has too many small frames")

    def _take_control(self) -> None:
        now = self._loop.time()
        if now - self._controls_since > CONTROLS_S:
            self._controls, self._controls_since = 0, now
        self._controls += 1
        if self._controls > MOST_CONTROLS:
            self._fail(CloseCode.POLICY_VIOLATION, "too many pings")

    def _hold(self) -> None:
        try:
            self._held.resize(self._size)
        except DragomanError:
            self._fail(CloseCode.TRY_AGAIN_LATER, "too many large messages; retry soon")

    async def _receive(self) -> Message:
        await self._came.wait()
        if not self._inbox:
            if not self._gone:
                self._came.clear()
            return self._news
        self._came.clear()
        message = self._inbox.popleft()
        self._go_on()
        return {"type": "websocket.receive", "bytes": message}

    # Output.

    async def _send(self, message: Message) -> None:
        kind = message["type"]
        if not self._gone:
            await self._writable.wait()
        if self._gone:
            raise ConnectionResetError
        if kind == "websocket.accept":
            self._begin()
        elif kind == "websocket.http.response.start":
            self._refusal = (message["status"], list(message["headers"]))
        elif kind == "websocket.http.response.body":
            self._refuse(message["body"])
        elif kind == "websocket.close":
            self._end(message.get("code", CloseCode.NORMAL_CLOSURE), message.get("reason") or "")
        else:
            text = message.get("text")
            async with self._speaking:
                await self._say(text.encode() if text is not None else message["bytes"])

    async def _say(self, data: bytes) -> None:
        """Send a message in frames; each waits until the client has read most of the one before."""
        for at in range(0, len(data) or 1, SENT_BYTES):
            if at:
                await asyncio.sleep(0)
                await self._writable.wait()
            if self._gone:
                raise ConnectionResetError
            send = self._frames.send_continuation if at else self._frames.send_text
            try:
                send(data[at : at + SENT_BYTES], fin=at + SENT_BYTES >= len(data))
            except InvalidState:
                raise ConnectionResetError from None
            self._flush()

    def _begin(self) -> None:
        owner = self._scope.get("dragoman.owner", "")
        self._held = self._bodies.reserve(owner)
        agreed = [(b"upgrade", b"websocket"), (b"connection", b"Upgrade")]
        self._write_head(101, [*agreed, (b"sec-websocket-accept", self._accept)])
        self._open = True
        self._timer = self._loop.call_later(PING_S, self._beat)
        self._go_on()

    def _refuse(self, body: bytes) -> None:
        assert self._refusal is not None
        status, headers = self._refusal
        self._write_head(
            status, [*headers, (b"content-length", b"%d" % len(body)), (b"connection", b"close")], body
        )
        self._leave(CloseCode.ABNORMAL_CLOSURE)
        self.transport.close()

    def _write_head(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes = b"") -> None:
        line = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
        lines = b"".join(b"%s: %s\r\n" % header for header in [*self._default_headers, *headers])
        self.transport.write(line + lines + b"\r\n" + body)

    def _flush(self) -> None:
        """Write the frames' output, and close the connection after the last of it."""
        chunks = self._frames.data_to_send()
        if chunks and not self.transport.is_closing():
            self.transport.write(b"".join(chunks))
            if chunks[-1] == b"":
                code = self._frames.close_sent.code if self._frames.close_sent else 1006
                self._leave(code)
                self.transport.close()

    def _fail(self, code: CloseCode, reason: str) -> None:
        self._frames.fail(code, reason)
        self._flush()

    def _end(self, code: int, reason: str = "") -> None:
        """Send a close frame; the connection ends soon, whether or not the client answers it."""
        if self._open and self._frames.state is State.OPEN and not self._gone:
            self._frames.send_close(code, reason)
            self._flush()
        elif not self._open and not self._gone:
            self._refusal = (500, [])
            self._refuse(b"")
        self._leave(code)
        self.transport.close()

    def _leave(self, code: int) -> None:
        """Stop reading and writing for the app, and notify it."""
        if not self._gone:
            self._gone = True
            self._raw, self._fragments = b"", []
            self._held.release()
            self._inbox.clear()
            self._news = {"type": "websocket.disconnect", "code": code}
            self._came.set()
            self._writable.set()
            if self._timer is not None:
                self._timer.cancel()

    # Timeouts.

    def _beat(self) -> None:
        self._timer = self._loop.call_later(PING_S, self._beat)
        if self._heard or self._paused or not self._writable.is_set():
            # A client that does not read is disconnected by `WriteTimeout`.
            self._heard = False
        elif self._asked:
            self._leave(CloseCode.ABNORMAL_CLOSURE)
            self.transport.abort()
        else:
            self._asked = True
            self._frames.send_ping(b"")
            self._flush()

    def pause_writing(self) -> None:
        self._stall.begin()
        if not self._gone:
            self._writable.clear()
            self._go_on()

    def resume_writing(self) -> None:
        self._stall.end()
        if not self._gone:
            self._writable.set()
            self._go_on()

    def shutdown(self) -> None:
        """Close the socket because the server stops."""
        self._end(CloseCode.SERVICE_RESTART)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave(CloseCode.ABNORMAL_CLOSURE)
        self._stall.end()
        self._counted.leave()
        self.transport.lost()
        self._timer = None
        self._frames.parser.close()
        self._over(self)
