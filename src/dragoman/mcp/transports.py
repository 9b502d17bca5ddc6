"""Connections to MCP servers, over HTTP or to a process, with limits on everything they send.

Every failure becomes a message that is safe to show.
"""

import asyncio
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import IO, Any, Literal, TypeAlias

import anyio
import httpx2
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client import Transport
from mcp.client.sse import sse_client
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter
from msgspec import Struct
from pydantic import ValidationError

from dragoman.mcp import spec as specs
from dragoman.mcp.spec import McpFailure, McpLimits, McpServerSpec
from dragoman.outbound import NonPublicAddress, public_address
from dragoman.tracing import outgoing

# Errors.


# Messages of the SDK about connections, under an error code that servers also use otherwise.
CLOSED = ("Connection closed", "SSE stream")
UNREADABLE = "Failed to parse"
TOO_LARGE = ("the answer is larger than", "byte limit")


def failure_of(error: BaseException, spec: McpServerSpec) -> McpFailure:
    """Translate an exception of the SDK, of HTTP or of the system into an McpFailure."""
    if isinstance(error, BaseExceptionGroup):
        return failure_of(error.exceptions[0], spec)
    if isinstance(error, McpFailure):
        return error
    if isinstance(error, MCPError):
        return _of_answer(error, spec)
    if isinstance(error, httpx2.HTTPStatusError):
        return of_status(error.response.status_code, spec)
    if isinstance(error, httpx2.SSEError):
        is_large = any(words in str(error) for words in TOO_LARGE)
        return too_large("an event is too large", spec) if is_large else unreadable(spec)
    if isinstance(error, httpx2.TransportError):
        return of_status(0, spec)
    if isinstance(error, OSError):
        why = os.strerror(error.errno) if error.errno else type(error).__name__
        return McpFailure("unreachable", f"The MCP server {spec.label} could not be started: {why}.")
    if isinstance(error, ValidationError):
        return unreadable(spec)
    return McpFailure("protocol", f"The MCP server {spec.label} broke the protocol ({type(error).__name__}).")


def of_status(status: int, spec: McpServerSpec) -> McpFailure:
    """Build the failure of an HTTP status: `of_status(401, spec)`; 0 means no reply at all."""
    if not status:
        return McpFailure("unreachable", f"The MCP server {spec.label} could not be reached.")
    return McpFailure("http", f"The MCP server {spec.label} answered with HTTP status {status}.", status)


def timed_out(what: str, seconds: float, spec: McpServerSpec) -> McpFailure:
    return McpFailure("timeout", f"The MCP server {spec.label} did not {what} within {seconds:g} seconds.")


def closed(spec: McpServerSpec) -> McpFailure:
    return McpFailure("unreachable", f"The MCP server {spec.label} closed the connection before it answered.")


def too_large(what: str, spec: McpServerSpec) -> McpFailure:
    return McpFailure("protocol", f"The MCP server {spec.label} sent more than is allowed: {what}.")


def unreadable(spec: McpServerSpec) -> McpFailure:
    return McpFailure("protocol", f"The MCP server {spec.label} sent an answer that is not of the protocol.")


def _of_answer(error: MCPError, spec: McpServerSpec) -> McpFailure:
    data: Any = error.data
    if isinstance(data, dict) and FAILED in data:
        return of_status(data[FAILED], spec)
    if error.message.startswith((UNREADABLE, *CLOSED)):
        if any(word in error.message for word in TOO_LARGE):
            return too_large("an answer is too large", spec)
        return unreadable(spec) if error.message.startswith(UNREADABLE) else closed(spec)
    text = spec.without_secrets(error.message)
    return McpFailure(
        "protocol", f"The MCP server {spec.label} answered with error {error.code}: {text}", error.code
    )


# The HTTP side of a connection, between the SDK and the socket.
#
# The SDK reads JSON replies of any size, drops the status of errors, and ends the connection with all its
# calls when one request fails. Here replies are limited, and a failed request becomes a JSON-RPC error for
# that request alone, with the cause in its data.


FAILED = "dragoman.http"
"""The key in the data of our errors; its value is the HTTP status, or 0 without a reply."""
# These statuses concern access, whatever the body says.
ABOUT_ACCESS = frozenset({401, 403, 407})
NOT_FOUND = 404
INTERNAL_ERROR = -32603
PACE_S = 0.2
MOST_VALUES = 65_536
"""Maximum number of JSON values in a message above the plain size limit."""
BLANKS = (b"\n\n", b"\r\n\r\n", b"\r\r")
"""Separators between two events."""

Refused: TypeAlias = Callable[[int], None]
"""Called with the status of a rejected message; 0 if the connection itself is gone."""


def message_bytes(bounds: McpLimits) -> int:
    """Return the size limit of a message with media in base64: no more than a client may send."""
    plain, limits = bounds.answer_bytes, bounds.limits
    return max(plain, min(plain + limits.media_bytes * 4 // 3, limits.body_bytes))


class MessageSizeGuard:
    """Limits the size of a message while it arrives.

    A message above the plain limit must be mostly media, so it has few JSON values however long it is, and
    the number of values is what makes parsing expensive. They are counted by their separators.
    """

    def __init__(self, bounds: McpLimits) -> None:
        self._plain, self._most = bounds.answer_bytes, message_bytes(bounds)
        self._size = self._values = 0

    def add(self, data: bytes) -> bool:
        self._size += len(data)
        self._values += sum(data.count(mark) for mark in b",:[{")
        return self._size <= self._plain or (self._size <= self._most and self._values <= MOST_VALUES)

    def add_event(self, data: bytes) -> bool:
        """Add bytes of a stream, in which each event is a message; the SDK limits their size."""
        end = max(data.rfind(blank) + len(blank) if blank in data else 0 for blank in BLANKS)
        if end:
            self._size = self._values = 0
        return self.add(data[end:]) or self._values <= MOST_VALUES


class GuardedTransport(httpx2.AsyncBaseTransport):
    def __init__(
        self, bounds: McpLimits, refused: Refused | None = None, *, only_public: bool = False
    ) -> None:
        """`refused` is for SSE, where the reply to a POST is not the answer to its request."""
        self._inner = httpx2.AsyncHTTPTransport(retries=0)
        self._bounds = bounds
        self._refused = refused
        self._next_stream = 0.0
        self._only_public = only_public

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        is_message = request.method == "POST"
        if (trace := outgoing.get()) is not None:
            request.headers.update(trace)
        if request.method == "GET":
            await self._pace()
        try:
            sent = await self._aim(request) if self._only_public else request
            response = await self._inner.handle_async_request(sent)
        except httpx2.TransportError:
            if not is_message:
                raise
            return self._failure(request, 0)
        # We request no compression, because a small body could be huge when decompressed; it is read as
        # received.
        response.headers.pop("content-encoding", None)
        response.stream = BoundedStream(response, self._bounds, self._refused)
        if is_message and response.status_code >= 400:
            return await self._of_refusal(request, response)
        return response

    async def _aim(self, request: httpx2.Request) -> httpx2.Request:
        """Send the request to a checked IP address; certificates are verified for the host name."""
        url = request.url
        try:
            address = await public_address(url.host, url.port or (443 if url.scheme == "https" else 80))
        except NonPublicAddress:
            raise httpx2.ConnectError("the host has no public address", request=request) from None
        return httpx2.Request(
            request.method,
            url.copy_with(host=address),
            headers=request.headers,
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": url.host},
        )

    async def _pace(self) -> None:
        """Limit the rate of reconnections: a server may end its stream and ask for a new one forever."""
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


class BoundedStream(httpx2.AsyncByteStream):
    """The body of a reply up to its limit, or each event of a stream."""

    def __init__(self, response: httpx2.Response, bounds: McpLimits, ended: Refused | None) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        self._inner = response.stream
        is_events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        weight = MessageSizeGuard(bounds)
        self._fits = weight.add_event if is_events else weight.add
        self._ended = ended if is_events else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._inner:
                if not self._fits(chunk):
                    raise httpx2.StreamError("the answer is larger than it may be")
                yield chunk
        except httpx2.TransportError:
            # The SDK turns an error of this class into an error of the request; others end the connection.
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


# Servers that are processes: messages are lines on their standard input and output.
#
# The SDK has this transport, too, but buffers a line without an end and joins it again with every chunk. Here
# the length of lines is limited.


# Seconds for the process to exit after its input closes, and again after SIGTERM.
LEAVE_S = 2.0
DRAIN_BYTES = 65536
POLL_INTERVAL_S = 0.5

Received: TypeAlias = SessionMessage | Exception
Lost: TypeAlias = Callable[[McpFailure], None]


def stdio(spec: McpServerSpec, bounds: McpLimits, lost: Lost, errors: IO[str] | None) -> Transport:
    """Run the process of a server; its standard error goes to `errors`, or is discarded."""
    return _running(spec, bounds, lost, errors)


@asynccontextmanager
async def _running(
    spec: McpServerSpec, bounds: McpLimits, lost: Lost, errors: IO[str] | None
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Received], MemoryObjectSendStream[SessionMessage]]]:
    assert spec.command is not None
    process = await asyncio.create_subprocess_exec(
        spec.command,
        *spec.args,
        stdin=PIPE,
        stdout=PIPE,
        stderr=errors or DEVNULL,
        env=get_default_environment() | spec.env,
        cwd=spec.cwd,
        limit=message_bytes(bounds),
        # A new session, so that processes started by the server end with it.
        start_new_session=True,
    )
    received, read = anyio.create_memory_object_stream[Received](0)
    write, to_send = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with anyio.create_task_group() as pipes, received, read, write, to_send:
            pipes.start_soon(_read_lines, process, received, spec, bounds, lost)
            pipes.start_soon(_write_lines, process, to_send)
            pipes.start_soon(_watch, process, spec, lost)
            yield read, write
            pipes.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _read_lines(
    process: Process,
    received: MemoryObjectSendStream[Received],
    spec: McpServerSpec,
    bounds: McpLimits,
    lost: Lost,
) -> None:
    assert process.stdout is not None
    failure = closed(spec)
    async with received:
        try:
            while line := await process.stdout.readline():
                if not MessageSizeGuard(bounds).add(line):
                    raise ValueError
                await received.send(_message(line))
        except ValueError:
            failure = too_large("a line is too long, or of too many values", spec)
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        lost(failure)


def _message(line: bytes) -> Received:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValidationError as error:
        # Many servers also print other lines; they get no reply.
        return error


async def _write_lines(process: Process, to_send: MemoryObjectReceiveStream[SessionMessage]) -> None:
    assert process.stdin is not None
    # The reader notices a broken pipe by the end of the output.
    with suppress(OSError, anyio.ClosedResourceError):
        async for item in to_send:
            line = item.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(line.encode() + b"\n")
            await process.stdin.drain()


async def _watch(process: Process, spec: McpServerSpec, lost: Lost) -> None:
    """Detect that the process has ended, even if a child of it holds its output open."""
    # `wait` would also wait for the output to close.
    while process.returncode is None:  # noqa: ASYNC110, nothing else tells either
        await anyio.sleep(POLL_INTERVAL_S)
    # Let the reader read the last output first.
    await anyio.sleep(POLL_INTERVAL_S)
    lost(closed(spec))


async def _end(process: Process) -> None:
    """Close the input, which tells a server to exit; then terminate it and its children."""
    assert process.stdin is not None
    process.stdin.close()
    await _wait(process)
    if process.returncode is None:
        _signal(process, signal.SIGTERM)
        await _wait(process)
    _signal(process, signal.SIGKILL)
    await _wait(process)


async def _wait(process: Process) -> None:
    assert process.stdout is not None
    with anyio.move_on_after(LEAVE_S), suppress(OSError):
        # A server that blocks on writing its output cannot notice that its input is closed.
        while await process.stdout.read(DRAIN_BYTES):
            pass
        await process.wait()


def _signal(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


# Choosing the transport of the SDK for a server.


NO_SUCH_TRANSPORT = frozenset({400, 404, 405})
"""Statuses with which an SSE-only server answers a POST to its URL."""


class Attempt(Struct, frozen=True):
    kind: specs.Transport
    mode: Literal["auto", "legacy"] = "auto"
    """Whether to request the newest protocol revision first, or only the handshake of older ones."""


def attempts(spec: McpServerSpec) -> tuple[Attempt, ...]:
    """Return how to connect, in order. SSE-only servers support only the older handshake."""
    if spec.command is not None:
        return (Attempt("stdio"), Attempt("stdio", "legacy"))
    known = {"http": (Attempt("http"),), "sse": (Attempt("sse", "legacy"),)}
    return known.get(spec.transport or "", (*known["http"], *known["sse"]))


def may_be_older(attempt: Attempt, failure: McpFailure) -> bool:
    """Whether the failure is how an older server reacts to a newer protocol."""
    if attempt.kind == "stdio":
        # Some servers with early SDKs exit when they read an unknown request.
        return failure.kind == "unreachable"
    return failure.kind == "http" and failure.code in NO_SUCH_TRANSPORT


def transport(
    kind: specs.Transport, spec: McpServerSpec, bounds: McpLimits, lost: Lost, errors: IO[str] | None
) -> Transport:
    """Create the transport; `lost` is called when the connection is gone for good, where that can be
    noticed.
    """
    if kind == "stdio":
        return stdio(spec, bounds, lost, errors)
    if kind == "http":
        return _streamable(spec, bounds)

    def refused(status: int) -> None:
        lost(of_status(status, spec) if status else closed(spec))

    def client(headers: object = None, timeout: object = None, auth: object = None) -> httpx2.AsyncClient:
        return _client(spec, bounds, refused)

    assert spec.url is not None
    return sse_client(spec.url, httpx_client_factory=client)


@asynccontextmanager
async def _streamable(spec: McpServerSpec, bounds: McpLimits) -> AsyncIterator[Any]:
    assert spec.url is not None
    async with (
        _client(spec, bounds) as client,
        streamable_http_client(
            spec.url, http_client=client, max_sse_event_size=message_bytes(bounds)
        ) as streams,
    ):
        yield streams


def _client(spec: McpServerSpec, bounds: McpLimits, refused: Refused | None = None) -> httpx2.AsyncClient:
    """Create an HTTP client per connection: cookies and headers of one server never reach another."""
    return httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity", **spec.all_headers()},
        # A stream may be silent for long; every call has its own timeout.
        timeout=httpx2.Timeout(bounds.connect_s, read=None),
        # Proxies and passwords of the environment are not used for a URL that a client may have named.
        trust_env=False,
        transport=GuardedTransport(bounds, refused, only_public=spec.only_public),
    )
