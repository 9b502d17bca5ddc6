"""A request and its reply over ASGI: a body within its limit, JSON or stream replies, and errors."""

import asyncio
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from os import urandom
from typing import Any, ParamSpec, TypeAlias, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from dragoman.api.attachments import MARKS
from dragoman.api.multipart import FORM_BYTES, MEDIA
from dragoman.api.reply import ErrorSerializer, encode_json, page
from dragoman.api.request_decoder import IgnoredFields, Unknown, check_shape
from dragoman.errors import (
    BadRequest,
    BodyTooLarge,
    DragomanError,
    EngineFailed,
    MethodNotAllowed,
    UnsupportedMediaType,
)
from dragoman.http.admission import ActiveRequest, ByteBudget, ByteReservation, ReplyBudget
from dragoman.http.connection.limiter import CountedConnection
from dragoman.http.connection.uvicorn_internals import corked, is_disconnected, listens
from dragoman.http.key_file import ANONYMOUS
from dragoman.http.query_string import QueryString as QueryString
from dragoman.limits import Limits
from dragoman.store import Record, StoredItem
from dragoman.tracing import SESSION, session
from dragoman.turns.queue import Offloader, WorkerPool
from dragoman.turns.tool_loop import ClientGone

P = ParamSpec("P")
R = TypeVar("R")
_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_encode = msgspec.json.Encoder().encode
CHUNK_BYTES = 32 * 1024
SSE = b"text/event-stream; charset=utf-8"
NOTICE_FIELDS = frozenset({"ignored", "unenforced", "broken", "overridden"})
"""Facts returned in headers: ignored fields, constraints that were not enforced or not met, and values that a
preset overrode."""


Later: TypeAlias = Callable[[Callable[[], None]], None]
"""Calls a function after a while."""
Fill: TypeAlias = Callable[[str, bytes, Offloader], Coroutine[Any, Any, bytes]]
"""Inserts the contents of files into a body of an owner."""


class Exchange:
    waits = False
    """Whether to wait for a model that is being loaded, whatever the settings say: batch lines are not
    retried by a client."""
    explain_failure: Callable[[EngineFailed], Awaitable[DragomanError]] | None = None
    """Returns the cause of an engine failure."""
    release_model: Callable[[], None] = staticmethod(lambda: None)
    """Releases the model that is held for the request."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        limits: Limits,
        workers: WorkerPool,
        bodies: ByteBudget,
        replies: ReplyBudget,
        unknown_fields: Unknown = "warn",
    ) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        session.set(self.headers.get(SESSION, b"").decode("latin-1"))
        data = self.headers.get(b"x-request-id", b"")
        self.request_id = data.decode() if _SANE_ID.fullmatch(data) else f"req_{urandom(16).hex()}"
        self.status = 0
        self.owner = ""
        """The hash of the API key; empty if keys are off."""
        self.key = ANONYMOUS
        """The rights of the key."""
        self.active: ActiveRequest
        """The active request; set only on routes with a limit."""
        self.low_priority = False
        """Whether the request does not use the engine."""
        self.head: dict[bytes, bytes] = {b"x-content-type-options": b"nosniff"}
        """Headers of every reply."""
        self.also: Callable[[Mapping[bytes, bytes]], Mapping[bytes, bytes]] | None = None
        """Returns reply headers under the names of another API."""
        self.ignored = IgnoredFields(unknown_fields)
        """Collects the fields of the body without effect."""
        self.log_fields: dict[str, Any] = {}
        """Data about the request for the access log and the metrics."""
        self.receive = receive
        self.send = send
        self.resolve_attachments: Fill | None = None
        """Inserts the contents of files into a body that names some."""
        self.body_bytes = 0
        """Size of the body."""
        self._bodies = bodies
        self._replies = replies
        self._held: ByteReservation | None = None
        """The bytes of the body, while any of it may be needed."""
        self._limits = limits
        self._workers = workers
        self._changes_nothing = self.method in ("GET", "HEAD")
        self._reading = False
        self._streaming = False
        self._ended = False

    @property
    def path_params(self) -> dict[str, str]:
        params: dict[str, str] = self.scope.get("path_params", {})
        return params

    @property
    def path_id(self) -> str:
        """The id in the path, such as in `/v1/responses/{id}`."""
        return self.path_params["id"]

    def check_model(self, name: str) -> None:
        """Raise unless the key may use this model; other keys cannot see that it exists."""
        self.key.check_use(name)

    async def read(self, read: Callable[[bytes], R], *, checked: bool = True) -> tuple[R, int]:
        """Return what `read` makes of the body, and the body's size; the shape of the body is checked first.

        `checked` False means that `read` checks the shape itself.
        """
        body = await self._received()
        if self.resolve_attachments is not None and MARKS.search(body):
            # Fetching files ends when the client disconnects.
            body = await cancel_on_disconnect(
                self, self.resolve_attachments(self.owner, body, self.offload_unwatched)
            )
            if self._held is not None:
                self._held.resize(len(body))
        reading = partial(_read, body, self._limits, read) if checked else partial(read, body)
        result = (
            await self.offload(len(body), reading) if self._workers.should_offload(len(body)) else reading()
        )
        if names := self.ignored.summary:
            self.log_fields["ignored"] = names
        return result, len(body)

    async def answer(self, size: int, work: Callable[[], Any]) -> None:
        """Reply with the result of `work` on a body of this size, computed and encoded in one step."""
        self._changes_nothing = True
        encoded = await self.offload(size, lambda: self.encoder(size)(work()))
        await self.reply(encoded, b"application/json")

    def encoder(self, size: int) -> Callable[[Any], bytes]:
        """Return the encoder for JSON of about this size: large values are encoded in chunks, which is slower
        but does not block."""
        return encode_json if self._workers.should_offload(size) else _encode

    async def offload(self, size: int, work: Callable[[], R]) -> R:
        """Run `work()`, in a thread if it is large; give up if the client disconnects before its turn."""
        working = self.offload_unwatched(size, work)
        return await (cancel_on_disconnect(self, working) if self._workers.should_offload(size) else working)

    def offload_unwatched(self, size: int, work: Callable[[], R]) -> Coroutine[Any, Any, R]:
        """Run the work in the same way, without watching for a disconnect."""
        return self._workers.run(self.owner, size, work, low_priority=self.low_priority)

    async def _received(self) -> bytes:
        chunks: list[bytes] = []
        size = 0
        self._reading = True
        self._held = held = self._bodies.reserve(self.owner)
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._limits.body_bytes:
                raise BodyTooLarge(f"The body is larger than {self._limits.body_bytes} bytes.")
            held.resize(size)
            if not message.get("more_body"):
                self._reading = False
                self.body_bytes = size
                return b"".join(chunks)

    async def pieces(self, most: int) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, for callers that do not keep it; the next chunk is read after this
        one is done."""
        self._reading = more = True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            data: bytes = message.get("body", b"")
            self.body_bytes += len(data)
            if self.body_bytes > most:
                raise BodyTooLarge(f"The body is larger than {most} bytes.")
            yield data
            more = message.get("more_body", False)
        self._reading = False

    def hand_on(self) -> ByteReservation | None:
        """Hand over the held bytes of the body to work that outlives the request."""
        held, self._held = self._held, None
        return held

    def hand_model_on(self) -> Callable[[], None]:
        """Hand over the function that releases the model, to work that outlives the request."""
        release, self.release_model = self.release_model, Exchange.release_model
        return release

    def close(self) -> None:
        """Release everything held for the request."""
        self.hand_model_on()()
        if self._held is not None:
            self._held.release()

    def check_media(self, *, any_type: bool = False) -> None:
        """Check the headers about the body before any of it is read."""
        media = self.headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
        any_type = any_type and media != b"multipart/form-data"
        if not any_type and media != b"application/json" and not media.endswith(b"+json"):
            raise UnsupportedMediaType("Send JSON with the header 'Content-Type: application/json'.")
        self._check_length(self._limits.body_bytes)

    def check_form(self) -> None:
        """Check the headers about a body that is a form with a file."""
        if self.headers.get(b"content-type", b"").split(b";")[0].strip().lower() != MEDIA:
            raise UnsupportedMediaType("Send a form with the header 'Content-Type: multipart/form-data'.")
        self._check_length(self._limits.file_bytes + FORM_BYTES)

    def _check_length(self, most: int) -> None:
        if self.headers.get(b"content-encoding", b"identity") != b"identity":
            raise UnsupportedMediaType("Compressed bodies are not accepted; leave out Content-Encoding.")
        length = self.headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise BadRequest("The Content-Length header is not a number.")
        if int(length) > most:
            raise BodyTooLarge(f"The body is larger than {most} bytes.")

    def on_disconnect(self, call: Callable[[], None]) -> Callable[[], object]:
        """Call `call` when the client disconnects, until the returned function is called. Use it only after
        the body was read."""
        connection: CountedConnection | None = self.scope.get("dragoman.connection")
        if connection is not None and listens(self.send):
            return connection.watch(call)
        return asyncio.create_task(self._tell_gone(call)).cancel

    async def _tell_gone(self, call: Callable[[], None]) -> None:
        await self.wait_disconnect()
        call()

    async def wait_disconnect(self) -> None:
        """Wait until the client disconnects. Use it only after the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def json(
        self, payload: Any, status: int = 200, extra: dict[bytes, bytes] | None = None, *, size: int = 0
    ) -> None:
        """Reply with JSON; `size` is the approximate size in bytes of a large payload."""
        body = await self.offload(size, partial(self.encoder(size), payload))
        await self.reply(body, b"application/json", status, extra)

    async def load_stored(self, load: Callable[P, Awaitable[R]], *given: P.args, **named: P.kwargs) -> R:
        """Run `await load(...)`, which gets stored data for a reply, when it is this key's turn.

        There must be no wait between this and the reply, which counts the loaded bytes.
        """
        async with self._replies.loading(self.owner):
            if is_disconnected(self.send):
                raise ClientGone
            self._replies.check(self.owner)
            return await load(*given, **named)

    async def page(self, stored: Sequence[StoredItem | Record], has_more: bool) -> None:
        """Reply with a page of a list of stored objects."""
        await self._reply(page(stored, has_more), b"application/json", 200, {})

    async def reply(
        self, body: bytes, media: bytes, status: int = 200, extra: dict[bytes, bytes] | None = None
    ) -> None:
        await self._reply([body], media, status, extra or {})

    async def _reply(
        self, parts: Sequence[bytes], media: bytes, status: int, extra: dict[bytes, bytes]
    ) -> None:
        size = sum(map(len, parts))
        headers = {b"content-length": b"%d" % size, b"content-type": media, **extra}
        left = size = 0 if self.method == "HEAD" else size
        with self._unread(size):
            # Sent in chunks, so that little is buffered in the transport of a slow client.
            pieces = _pieces(parts if size else [])
            with corked(self.send):
                await self._start(status, headers)
                first = next(pieces, b"")
                left -= len(first)
                await self._send_body(first, more=left > 0)
            for piece in pieces:
                left -= len(piece)
                await self._send_body(piece, more=left > 0)

    async def reply_in_pieces(
        self, size: int, pieces: AsyncGenerator[bytes, None], media: bytes, extra: dict[bytes, bytes]
    ) -> None:
        """Reply with chunks that are read as the client takes them: only one is in memory."""
        async with aclosing(pieces):
            headers = {b"content-length": b"%d" % size, b"content-type": media, **extra}
            if self.method == "HEAD" or not size:
                await self._start(200, headers)
                await self._send_body(b"", more=False)
                return
            await self._start(200, headers)
            left = size
            async for piece in pieces:
                left -= len(piece)
                with self._unread(len(piece), checked=False):
                    await self._send_body(piece, more=left > 0)

    def _unread(self, size: int, *, checked: bool = True) -> ByteReservation:
        """Count unread bytes of the reply. Only replies that the client can request again are rejected."""
        held = self._replies.reserve(self.owner)
        held.resize(size, checked=checked and self._changes_nothing)
        return held

    async def start_stream(self, first: bytes, media: bytes = SSE, later: Later | None = None) -> None:
        """Send headers and first bytes at once, so that the client sees that its request was received.

        With `later` they may wait for the next bytes, until the function passed to `later` is called.
        """
        if self._streaming:
            # The stream has begun with a comment that the model is loading.
            await self.write(first)
            return
        self._streaming = True
        headers = {
            b"content-type": media,
            b"cache-control": b"no-cache",
            b"x-accel-buffering": b"no",
        }
        with corked(self.send, later):
            await self._start(200, headers)
            await self._send_body(first[:CHUNK_BYTES], more=True)
        await self._in_pieces([first], CHUNK_BYTES)

    async def stream_stored(self, events: bytes, begin: int) -> None:
        """Stream stored events from an offset on, in chunks."""
        with self._unread(len(events)):
            await self.start_stream(b"")
            await self._in_pieces([events], begin)
            await self.end_stream()

    async def write_stored(self, events: bytes) -> None:
        """Write stored events, possibly many, to a stream that its client has resumed."""
        with self._unread(len(events)):
            await self._in_pieces([events], 0)

    async def _in_pieces(self, parts: Sequence[bytes], begin: int = 0) -> None:
        await send_in_pieces(self.send, parts, begin)

    async def write(self, *parts: bytes) -> None:
        await self._send_body(parts[0][:CHUNK_BYTES], more=True)
        await self._in_pieces(parts, CHUNK_BYTES)

    async def end_stream(self, last: bytes = b"") -> None:
        self._ended = True
        await self._send_body(last, more=False)

    async def _send_body(self, data: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        await self.send(message)

    async def fail(self, error: DragomanError, errors: ErrorSerializer) -> None:
        """Send the error as a reply, or as the last event of a stream that has begun."""
        error.clear_frames()
        self.log_fields |= {"error": error.message, "code": error.code}
        if self._ended:
            return
        if self._streaming:
            await self.write(errors.event(error))
            await self.end_stream()
        elif not self.status:
            if self._reading or isinstance(error, BodyTooLarge):
                self.head[b"connection"] = b"close"
            await self.json(errors.body(error), errors.status(error), retry_headers(error))

    async def _start(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status
        mapping = {name.encode(): text.encode() for name, text in notice_headers(self.log_fields).items()}
        named = {**headers, **mapping, **self.head, b"x-request-id": self.request_id.encode()}
        if self.also is not None:
            named |= self.also(named)
        await self.send({"type": "http.response.start", "status": status, "headers": list(named.items())})


def notice_headers(log_fields: Mapping[str, Any]) -> dict[str, str]:
    """Return headers such as `{"x-dragoman-ignored": "user"}`: how the answer differs from the request."""
    return {f"x-dragoman-{name}": log_fields[name] for name in sorted(NOTICE_FIELDS & log_fields.keys())}


def retry_headers(error: DragomanError) -> dict[bytes, bytes]:
    """Return headers on whether, when and how to retry."""
    advice = {b"www-authenticate": b"Bearer"} if error.status == 401 else {}
    if isinstance(error, MethodNotAllowed):
        advice[b"allow"] = ", ".join(error.allowed).encode()
    if error.retry_after is not None:
        advice[b"retry-after"] = b"%d" % error.retry_after
    if error.should_retry is not None:
        advice[b"x-should-retry"] = b"true" if error.should_retry else b"false"
    return advice


async def send_in_pieces(send: Send, parts: Sequence[bytes], begin: int = 0) -> None:
    """Send parts of a stream in chunks; `begin` is the offset in the first part."""
    for piece in _pieces(parts, begin):
        # Yield to other tasks, even if the client reads everything at once.
        await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": piece, "more_body": True})


def _pieces(parts: Sequence[bytes], begin: int = 0) -> Iterator[bytes]:
    """Join small parts and split large ones into chunks; `begin` is the offset in the first part."""
    gathered: list[bytes] = []
    size = 0
    for part in parts:
        for at in range(begin, len(part), CHUNK_BYTES):
            gathered.append(part[at : at + CHUNK_BYTES])
            size += len(gathered[-1])
            if size >= CHUNK_BYTES:
                yield b"".join(gathered)
                gathered, size = [], 0
        begin = 0
    if gathered:
        yield b"".join(gathered)


def _read(body: bytes, limits: Limits, read: Callable[[bytes], R]) -> R:
    check_shape(body, limits)
    return read(body)


async def cancel_on_disconnect(exchange: Exchange, work: Coroutine[Any, Any, R]) -> R:
    """Return the result of the work, which is cancelled if the client disconnects."""
    working = asyncio.create_task(work)
    watcher = asyncio.create_task(exchange.wait_disconnect())
    try:
        await asyncio.wait({working, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watcher.cancel()
        # Wait until the cancelled tasks have cleaned up.
        await asyncio.gather(working, watcher, return_exceptions=True)
