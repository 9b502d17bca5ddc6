"""One request and its reply, over ASGI: the body within its cap, JSON or a stream, a clean failure."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
from starlette.types import Message, Receive, Scope, Send

from dragoman.api.json_shape import check_shape
from dragoman.api.pages import page
from dragoman.api.sse import error_event
from dragoman.errors import BadRequest, BodyTooLarge, DragomanError, UnsupportedMedia
from dragoman.http.admission import Visit
from dragoman.http.short_cut import together
from dragoman.limits import Limits
from dragoman.store import Item, Record

_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_encode = msgspec.json.Encoder().encode
BIG_BODY = 32 * 1024
"""What is done with bodies beyond this is done in a thread, so that the others' tokens keep flowing."""
PIECE_BYTES = 32 * 1024


async def check_body(body: bytes, limits: Limits) -> None:
    """Raises where its JSON is of a shape that no request has."""
    if len(body) > BIG_BODY:
        await asyncio.to_thread(check_shape, body, limits)
    else:
        check_shape(body, limits)


class ClientGone(Exception):
    """The client closed the connection: nobody is there to answer."""


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"")
        self.request_id = given.decode() if _SANE_ID.fullmatch(given) else f"req_{uuid4().hex}"
        self.status = 0
        self.owner = ""
        """Whose key it is, as a hash; empty where keys are off."""
        self.visit: Visit
        """Only on routes that take the engine's time."""
        self.head: dict[bytes, bytes] = {b"x-content-type-options": b"nosniff"}
        """What every reply says beside its own headers."""
        self.facts: dict[str, Any] = {}
        """What the access log and the metrics say of this exchange."""
        self.receive = receive
        self.send = send
        self._limits = limits
        self._streaming = False
        self._ended = False

    @property
    def path_params(self) -> dict[str, str]:
        params: dict[str, str] = self.scope.get("path_params", {})
        return params

    async def body(self) -> bytes:
        """All of it, within the limits of what a body may be."""
        body = await self._received()
        await check_body(body, self._limits)
        return body

    async def _received(self) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._limits.body_bytes:
                raise BodyTooLarge(f"The body is larger than {self._limits.body_bytes} bytes.")
            if not message.get("more_body"):
                return b"".join(chunks)

    def check_media(self) -> None:
        """Of a request that may have a body, before anything of it is read."""
        media = self.headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
        if media != b"application/json" and not media.endswith(b"+json"):
            raise UnsupportedMedia("Send JSON with the header 'Content-Type: application/json'.")
        if self.headers.get(b"content-encoding", b"identity") != b"identity":
            raise UnsupportedMedia("Compressed bodies are not accepted; leave out Content-Encoding.")
        length = self.headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise BadRequest("The Content-Length header is not a number.")
        if int(length) > self._limits.body_bytes:
            raise BodyTooLarge(f"The body is larger than {self._limits.body_bytes} bytes.")

    async def gone(self) -> None:
        """Returns when the client has closed the connection. Only after the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def json(self, payload: Any, status: int = 200, extra: dict[bytes, bytes] | None = None) -> None:
        await self.reply(_encode(payload), b"application/json", status, extra)

    async def page(self, stored: Sequence[Item | Record], has_more: bool) -> None:
        """A piece of a list of what is stored."""
        await self.reply(page([one.body for one in stored], has_more), b"application/json")

    async def reply(
        self, body: bytes, media: bytes, status: int = 200, extra: dict[bytes, bytes] | None = None
    ) -> None:
        headers = {b"content-length": b"%d" % len(body), b"content-type": media, **(extra or {})}
        if self.method == "HEAD":
            body = b""
        # In pieces, so that little of it waits in the transport of a client that reads slowly.
        with together(self.send):
            await self._start(status, headers)
            await self._send_body(body[:PIECE_BYTES], more=len(body) > PIECE_BYTES)
        for at in range(PIECE_BYTES, len(body), PIECE_BYTES):
            await self._send_body(body[at : at + PIECE_BYTES], more=at + PIECE_BYTES < len(body))

    async def start_stream(self, first: bytes) -> None:
        """Headers and the first bytes leave at once: the client sees that it was heard."""
        self._streaming = True
        headers = {
            b"content-type": b"text/event-stream; charset=utf-8",
            b"cache-control": b"no-cache",
            b"x-accel-buffering": b"no",
        }
        with together(self.send):
            await self._start(200, headers)
            await self.write(first)

    async def write(self, data: bytes) -> None:
        await self._send_body(data, more=True)

    async def end_stream(self, last: bytes = b"") -> None:
        self._ended = True
        await self._send_body(last, more=False)

    async def _send_body(self, data: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        await self.send(message)

    async def fail(self, error: DragomanError) -> None:
        """The error as a reply, or as the last event of a stream that has begun."""
        error.let_go()
        self.facts["error"] = error.message
        if self._ended:
            return
        if self._streaming:
            await self.write(error_event(error))
            await self.end_stream()
        elif not self.status:
            if isinstance(error, BodyTooLarge):
                self.head[b"connection"] = b"close"
            await self.json(error.body(), error.status, _advice(error))

    async def _start(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status
        named = {**headers, **self.head, b"x-request-id": self.request_id.encode()}
        await self.send({"type": "http.response.start", "status": status, "headers": list(named.items())})


def _advice(error: DragomanError) -> dict[bytes, bytes]:
    """Whether, when and how to try again, in headers."""
    advice = {b"www-authenticate": b"Bearer"} if error.status == 401 else {}
    if error.retry_after is not None:
        advice[b"retry-after"] = b"%d" % error.retry_after
    if error.should_retry is not None:
        advice[b"x-should-retry"] = b"true" if error.should_retry else b"false"
    return advice
