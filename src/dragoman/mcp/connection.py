"""One open connection to an MCP server.

The SDK's context managers must be exited in the task that entered them, so each connection has an owner task.
Calls run in the tasks of their callers: cancelling one call does not affect the others.
"""

import asyncio
import logging
import math
import time
from binascii import a2b_base64
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from itertools import zip_longest
from typing import IO, Any, TypeAlias, TypeVar

import anyio
import mcp_types as wire
import msgspec
from mcp.client import Client, ClientSession
from mcp.client.session import IncomingMessage
from mcp.shared.exceptions import MCPError
from pydantic import TypeAdapter

from dragoman._version import __version__
from dragoman.errors import TOOLS, BadRequest
from dragoman.limits import Limits
from dragoman.mcp.spec import CallResult, McpFailure, McpLimits, McpServerSpec, McpTool
from dragoman.mcp.transports import (
    Attempt,
    attempts,
    closed,
    failure_of,
    may_be_older,
    timed_out,
    too_large,
    transport,
)
from dragoman.media import Media, MediaKind
from dragoman.media.headers import read_media

T = TypeVar("T")
Owners: TypeAlias = set[asyncio.Task[None]]
"""The owner tasks of connections until they are done."""
# These loggers log messages with headers, and tracebacks that quote them.
for _name in ("mcp.client", "mcp.shared", "httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)

# Seconds to close a connection; within this time a process is killed.
LEAVE_S = 8.0
ROUNDS = 10
ROUND_S = 0.1
ANSWER: TypeAdapter[wire.CallToolResult | wire.InputRequiredResult] = TypeAdapter(
    wire.CallToolResult | wire.InputRequiredResult
)

KINDS: dict[str, MediaKind] = {"image": "image", "audio": "audio"}


class McpConnection:
    """A connection: `await McpConnection.open(spec, bounds, owners)`. It is unusable after `end`, or once
    `is_closed`.
    """

    def __init__(
        self, spec: McpServerSpec, bounds: McpLimits, owners: Owners, how: Attempt, errors: IO[str] | None
    ) -> None:
        self._spec = spec
        self._bounds = bounds
        self._scope = anyio.CancelScope(deadline=anyio.current_time() + bounds.connect_s)
        self._ending = asyncio.Event()
        self._failure: McpFailure | None = None
        self._client = Client(
            transport(how.kind, spec, bounds, self._lost, errors),
            mode=how.mode,
            client_info=wire.Implementation(name="dragoman", version=__version__),
            message_handler=self._heard,
            # `ToolListCache` caches the tools, for servers of every protocol revision.
            cache=None,
        )
        self._listing = ToolListCache(bounds)
        self._ready = asyncio.Event()
        # The connection outlives the request that opens it, so it must not inherit that request's context.
        self._owner = asyncio.create_task(self._own(), name=f"mcp {spec.label}", context=Context())
        self._owner.add_done_callback(lambda _: self._ready.set())
        owners.add(self._owner)
        self._owner.add_done_callback(owners.discard)

    @classmethod
    async def open(
        cls, spec: McpServerSpec, bounds: McpLimits, owners: Owners, errors: IO[str] | None = None
    ) -> "McpConnection":
        """Connect by the newest protocol that the server supports."""
        *others, last = attempts(spec)
        for how in others:
            try:
                return await cls(spec, bounds, owners, how, errors)._opened()
            except McpFailure as failure:
                if not may_be_older(how, failure):
                    raise
        return await cls(spec, bounds, owners, last, errors)._opened()

    async def _opened(self) -> "McpConnection":
        try:
            await self._ready.wait()
        except asyncio.CancelledError:
            self.end()
            raise
        if self.is_closed:
            raise self._failure or closed(self._spec)
        return self

    @property
    def is_closed(self) -> bool:
        return self._failure is not None or self._ending.is_set() or self._owner.done()

    def end(self) -> None:
        """Begin to close; the owner task ends when cleanup is done."""
        self._ending.set()
        if not self._ready.is_set():
            self._scope.cancel()

    async def tools(self) -> list[McpTool]:
        if (known := self._listing.known()) is not None:
            return known
        return await self._ask(self._list(), "list its tools")

    async def call(self, name: str, arguments: dict[str, Any]) -> CallResult:
        call = ToolInvocation(self._client.session, self._spec, self._list)
        result = await self._ask(call.run(name, arguments), "answer the call")
        return result_of(result, self._bounds, self._spec)

    async def _list(self) -> list[McpTool]:
        return await self._listing.fetch(self._client.session, self._spec)

    async def _ask(self, question: Coroutine[Any, Any, T], what: str) -> T:
        """Await a reply, unless the connection ends or the timeout expires first."""
        asking = asyncio.create_task(question)
        asking.add_done_callback(_retrieve)
        seconds = self._bounds.call_s
        try:
            await asyncio.wait({asking, self._owner}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
        except Exception as error:
            failure = failure_of(error, self._spec)
            if failure.is_session_over:
                # Other callers on this connection cannot know whether the server has executed their calls.
                self._lost(closed(self._spec))
                raise failure from None
            raise self._failure or failure from None
        finally:
            asking.cancel()
        if self.is_closed:
            raise self._failure or closed(self._spec)
        raise timed_out(what, seconds, self._spec)

    async def _own(self) -> None:
        with self._scope:
            try:
                async with self._client:
                    self._scope.deadline = math.inf
                    self._ready.set()
                    await self._ending.wait()
                    self._scope.deadline = anyio.current_time() + LEAVE_S
            except (Exception, BaseExceptionGroup) as error:
                self._lost(failure_of(error, self._spec))
        if self._scope.cancelled_caught and not self._ending.is_set():
            self._lost(timed_out("connect", self._bounds.connect_s, self._spec))

    def _lost(self, failure: McpFailure) -> None:
        """Note why the connection is gone; the transport calls it, too. The first reason counts."""
        self._failure = self._failure or failure
        self.end()

    async def _heard(self, message: IncomingMessage) -> None:
        if isinstance(message, wire.ToolListChangedNotification):
            self._listing.forget()


def _retrieve(asked: asyncio.Task[Any]) -> None:
    """Retrieve the result of an abandoned call, so that asyncio does not log its error."""
    if not asked.cancelled():
        asked.exception()


class ToolListCache:
    """The tools of a server, fetched page by page and cached."""

    def __init__(self, bounds: McpLimits) -> None:
        self._bounds = bounds
        self._tools: list[McpTool] | None = None
        self._until = 0.0
        self._changes = 0

    def known(self) -> list[McpTool] | None:
        return self._tools if time.monotonic() < self._until else None

    def forget(self) -> None:
        self._until = 0.0
        self._changes += 1

    async def fetch(self, session: ClientSession, spec: McpServerSpec) -> list[McpTool]:
        changes = self._changes
        tools: list[McpTool] = []
        cursor: str | None = None
        cursors: set[str] = set()
        left = self._bounds.tools_bytes
        while True:
            page = await session.list_tools(params=wire.PaginatedRequestParams(cursor=cursor))
            tools += [tool_of(tool) for tool in page.tools]
            left -= sum(len(msgspec.json.encode(tool)) for tool in tools[-len(page.tools) :])
            if len(tools) > self._bounds.tools or left < 0:
                raise too_large(
                    f"{self._bounds.tools} tools or {self._bounds.tools_bytes} bytes of them", spec
                )
            cursor = page.next_cursor
            if not cursor:
                break
            if cursor in cursors or len(cursors) > self._bounds.tools:
                raise McpFailure("protocol", f"The MCP server {spec.label} lists its tools without end.")
            cursors.add(cursor)
        # A change reported meanwhile may affect a page that was read before it.
        if changes == self._changes:
            self._tools, self._until = tools, time.monotonic() + self._bounds.tools_age_s
        return tools


def tool_of(tool: wire.Tool) -> McpTool:
    hints = tool.annotations
    annotations = hints.model_dump(by_alias=True, exclude_none=True) if hints else None
    return McpTool(tool.name, tool.description, tool.input_schema, annotations)


class ToolInvocation:
    """One tool call, in as many rounds as the server needs.

    It does not use the SDK's `call_tool`, which also validates the result against the server's schema, whose
    regular expressions may take forever. The model gets the result unchanged.
    """

    def __init__(
        self, session: ClientSession, spec: McpServerSpec, relist: Callable[[], Awaitable[Any]]
    ) -> None:
        self._session = session
        self._spec = spec
        self._relist = relist

    async def run(self, name: str, arguments: dict[str, Any]) -> wire.CallToolResult:
        params = wire.CallToolRequestParams(name=name, arguments=arguments)
        for _ in range(ROUNDS):
            answer = await self._send(params)
            if isinstance(answer, wire.CallToolResult):
                return answer
            if answer.input_requests:
                what = "asks for input in the middle of a call, which is not supported"
                raise McpFailure("protocol", f"The MCP server {self._spec.label} {what}.")
            # The server wants the call repeated with the state that it has just sent.
            await asyncio.sleep(ROUND_S)
            params = params.model_copy(update={"request_state": answer.request_state})
        raise McpFailure(
            "protocol", f"The MCP server {self._spec.label} postpones its answer again and again."
        )

    async def _send(
        self, params: wire.CallToolRequestParams
    ) -> wire.CallToolResult | wire.InputRequiredResult:
        request = wire.CallToolRequest(params=params)
        try:
            return await self._session.send_request(request, ANSWER)
        except MCPError as error:
            if error.code != wire.HEADER_MISMATCH:
                raise
        # Some arguments must be repeated in headers, as the list of tools says.
        await self._relist()
        return await self._session.send_request(request, ANSWER)


def result_of(result: wire.CallToolResult, bounds: McpLimits, spec: McpServerSpec) -> CallResult:
    texts = [part_text(part) for part in result.content]
    if not any(isinstance(part, wire.TextContent) for part in result.content):
        texts = [*filter(None, (*texts, _write_structured(result)))]
    text, most = "\n".join(texts), bounds.result_chars
    if len(text) > most:
        raise too_large(f"a result of {len(text)} characters, above the limit of {most}", spec)
    return CallResult(text, result.is_error, () if result.is_error else _parts_of(result, texts, bounds))


def _parts_of(result: wire.CallToolResult, texts: list[str], bounds: McpLimits) -> tuple[str | Media, ...]:
    """Return texts with media between them; empty if there is no supported media."""
    shown = [_read_shown(part, bounds.limits) for part in result.content]
    if not any(shown):
        return ()
    return tuple(media or text for media, text in zip_longest(shown, texts))


def _read_shown(part: wire.ContentBlock, limits: Limits) -> Media | None:
    """Read an image or audio clip, if it is valid and within the limits."""
    match part:
        case wire.ImageContent() | wire.AudioContent():
            kind, data = str(part.type), part.data
        case wire.EmbeddedResource(resource=wire.BlobResourceContents() as blob):
            kind, data = (blob.mime_type or "").partition("/")[0], blob.blob
        case _:
            return None
    if kind not in KINDS:
        return None
    with suppress(ValueError, BadRequest):
        return read_media(a2b_base64(data, strict_mode=True), KINDS[kind], limits, TOOLS)
    return None


def _write_structured(result: wire.CallToolResult) -> str:
    if result.structured_content is None:
        return ""
    return msgspec.json.encode(result.structured_content).decode()


def part_text(part: wire.ContentBlock) -> str:
    """Format a content part as text: `[image image/png, 3 KiB]` mentions media to the model."""
    match part:
        case wire.TextContent():
            return part.text
        case wire.ImageContent() | wire.AudioContent():
            return f"[{part.type} {part.mime_type}, {_size(part.data)}]"
        case wire.ResourceLink():
            return f"[resource {part.name}: {part.uri}]"
        case wire.EmbeddedResource():
            return _resource_text(part.resource)


def _resource_text(resource: wire.TextResourceContents | wire.BlobResourceContents) -> str:
    if isinstance(resource, wire.TextResourceContents):
        return resource.text
    return f"[resource {resource.uri}, {_size(resource.blob)}]"


def _size(base64: str) -> str:
    return f"{max(1, len(base64) * 3 // 4 // 1024)} KiB"
