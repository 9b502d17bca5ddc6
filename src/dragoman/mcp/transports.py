"""How a server is reached: what its spec says, as a transport of the SDK."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO, Any, Literal

import httpx2
from mcp.client import Transport
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from msgspec import Struct

from dragoman.mcp import spec as specs
from dragoman.mcp.failures import closed, of_status
from dragoman.mcp.guard import GuardedTransport, Refused
from dragoman.mcp.spec import McpBounds, McpFailure, ServerSpec
from dragoman.mcp.stdio import Lost, stdio

NO_SUCH_TRANSPORT = frozenset({400, 404, 405})
"""How a server that only has SSE answers a message sent to its address."""


class Attempt(Struct, frozen=True):
    kind: specs.Transport
    mode: Literal["auto", "legacy"] = "auto"
    """Whether the newest revision is asked for first, or only the handshake of the older ones."""


def attempts(spec: ServerSpec) -> tuple[Attempt, ...]:
    """How to connect, in order. Servers that only have SSE know nothing but the handshake."""
    if spec.command is not None:
        return (Attempt("stdio"), Attempt("stdio", "legacy"))
    known = {"http": (Attempt("http"),), "sse": (Attempt("sse", "legacy"),)}
    return known.get(spec.transport or "", (*known["http"], *known["sse"]))


def may_be_older(attempt: Attempt, failure: McpFailure) -> bool:
    """Whether the failure is one with which an older server meets what it does not know."""
    if attempt.kind == "stdio":
        # Some that were made with early SDKs end when they read a request that they do not know.
        return failure.kind == "unreachable"
    return failure.kind == "http" and failure.code in NO_SUCH_TRANSPORT


def transport(
    kind: specs.Transport, spec: ServerSpec, bounds: McpBounds, lost: Lost, errors: IO[str] | None
) -> Transport:
    """`lost` is told when the connection is gone for good, by those transports that can be."""
    if kind == "stdio":
        return stdio(spec, bounds.answer_bytes, lost, errors)
    if kind == "http":
        return _streamable(spec, bounds)

    def refused(status: int) -> None:
        lost(of_status(status, spec) if status else closed(spec))

    def client(headers: object = None, timeout: object = None, auth: object = None) -> httpx2.AsyncClient:
        return _client(spec, bounds, refused)

    assert spec.url is not None
    return sse_client(spec.url, httpx_client_factory=client)


@asynccontextmanager
async def _streamable(spec: ServerSpec, bounds: McpBounds) -> AsyncIterator[Any]:
    assert spec.url is not None
    async with (
        _client(spec, bounds) as client,
        streamable_http_client(
            spec.url, http_client=client, max_sse_event_size=bounds.answer_bytes
        ) as streams,
    ):
        yield streams


def _client(spec: ServerSpec, bounds: McpBounds, refused: Refused | None = None) -> httpx2.AsyncClient:
    """Each connection has its own client: cookies and headers of one server never reach another."""
    return httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity", **spec.all_headers()},
        # A stream may be silent for long. Whoever waits for an answer has a timeout of his own.
        timeout=httpx2.Timeout(bounds.connect_s, read=None),
        # No proxy and no password of the environment is used for an address that a client may have named.
        trust_env=False,
        transport=GuardedTransport(bounds.answer_bytes, refused, only_public=spec.only_public),
    )
