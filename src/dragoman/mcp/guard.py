"""The HTTP side of a connection, between the SDK and the socket.

The SDK reads a JSON answer whole, whatever its size, drops the status of an error, and ends the connection
with all calls on it when one request breaks. Here answers are cut off at a bound, and what goes wrong with
one request becomes a JSON-RPC error to that request, which carries what happened in its data.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import httpx2
import msgspec

from dragoman.mcp.resolve import NotPublic, public_address

FAILED = "dragoman.http"
"""The key in the data of our errors; its value is the status, or 0 where there was no answer."""
# These are about who asks, whatever the body says.
ABOUT_ACCESS = frozenset({401, 403, 407})
NOT_FOUND = 404
INTERNAL_ERROR = -32603
PACE_S = 0.2

Refused: TypeAlias = Callable[[int], None]
"""Told of the status with which a message was refused; 0 where the connection itself is gone."""


class GuardedTransport(httpx2.AsyncBaseTransport):
    def __init__(
        self, answer_bytes: int, refused: Refused | None = None, *, only_public: bool = False
    ) -> None:
        """`refused` is for SSE, where what is answered to a message is not the answer to its request."""
        self._inner = httpx2.AsyncHTTPTransport(retries=0)
        self._most = answer_bytes
        self._refused = refused
        self._next_stream = 0.0
        self._only_public = only_public

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        is_message = request.method == "POST"
        if request.method == "GET":
            await self._pace()
        try:
            sent = await self._aimed(request) if self._only_public else request
            response = await self._inner.handle_async_request(sent)
        except httpx2.TransportError:
            if not is_message:
                raise
            return self._failure(request, 0)
        # We ask for none that is compressed, since a small one may be huge when read. It is read as it came.
        response.headers.pop("content-encoding", None)
        response.stream = Bounded(response, self._most, self._refused)
        if is_message and response.status_code >= 400:
            return await self._of_refusal(request, response)
        return response

    async def _aimed(self, request: httpx2.Request) -> httpx2.Request:
        """The request, to an address that was looked at; the name is what certificates are checked for."""
        url = request.url
        try:
            address = await public_address(url.host, url.port or (443 if url.scheme == "https" else 80))
        except NotPublic:
            raise httpx2.ConnectError("the host has no public address", request=request) from None
        return httpx2.Request(
            request.method,
            url.copy_with(host=address),
            headers=request.headers,
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": url.host},
        )

    async def _pace(self) -> None:
        """A server may end its stream and ask to be asked again at once, for ever."""
        now = time.monotonic()
        wait, self._next_stream = self._next_stream - now, max(now, self._next_stream) + PACE_S
        await asyncio.sleep(max(0.0, wait))

    async def _of_refusal(self, request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
        status = response.status_code
        try:
            body = await response.aread()
        except (httpx2.StreamError, httpx2.TransportError):
            body = b""
        finally:
            await response.aclose()
        is_session_over = status == NOT_FOUND and "mcp-session-id" in request.headers
        if status in ABOUT_ACCESS or is_session_over or not is_rpc_error(body):
            return self._failure(request, status)
        headers = {"content-type": "application/json"}
        return httpx2.Response(status, headers=headers, content=body, request=request)

    def _failure(self, request: httpx2.Request, status: int) -> httpx2.Response:
        if self._refused is not None:
            self._refused(status)
        error = {"code": INTERNAL_ERROR, "message": "", "data": {FAILED: status}}
        body = {"jsonrpc": "2.0", "id": None, "error": error}
        return httpx2.Response(status or 502, json=body, request=request)

    async def aclose(self) -> None:
        await self._inner.aclose()


class Bounded(httpx2.AsyncByteStream):
    """The body of an answer up to a bound; a stream of events has a bound for each event instead."""

    def __init__(self, response: httpx2.Response, most: int, ended: Refused | None) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        self._inner = response.stream
        is_events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        self._most = None if is_events else most
        self._ended = ended if is_events else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = 0
        try:
            async for chunk in self._inner:
                seen += len(chunk)
                if self._most is not None and seen > self._most:
                    raise httpx2.StreamError(f"the answer is larger than {self._most} bytes")
                yield chunk
        except httpx2.TransportError:
            # The SDK turns an error of this class into one of the request; others end the connection.
            raise httpx2.StreamError("the answer broke off") from None
        finally:
            if self._ended is not None:
                self._ended(0)

    async def aclose(self) -> None:
        await self._inner.aclose()


def is_rpc_error(body: bytes) -> bool:
    try:
        value: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return False
    return isinstance(value, dict) and value.get("jsonrpc") == "2.0" and isinstance(value.get("error"), dict)
