"""One open connection to a server.

The SDK's context managers must be left in the task that entered them, so each connection has a task that
owns it. Calls run in the tasks of those who ask: cancelling one of them does not harm the others.
"""

import asyncio
import logging
import math
from collections.abc import Coroutine
from typing import IO, Any, TypeAlias, TypeVar

import anyio
import mcp_types as wire
from mcp.client import Client
from mcp.client.session import IncomingMessage

from dragoman._version import __version__
from dragoman.mcp.calling import Call
from dragoman.mcp.content import result_of
from dragoman.mcp.failures import closed, failure_of, timed_out
from dragoman.mcp.listing import Listing
from dragoman.mcp.spec import Bounds, CallResult, McpFailure, McpTool, ServerSpec
from dragoman.mcp.transports import Attempt, attempts, may_be_older, transport

T = TypeVar("T")
Owners: TypeAlias = set[asyncio.Task[None]]
"""Where the tasks that own connections are kept until they are done."""
# They log what is sent and received, headers too, and tracebacks that quote it.
for _name in ("mcp.client", "mcp.shared", "httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)

# What a connection gets to say goodbye; a process is ended by force within this time.
LEAVE_S = 8.0


class Connection:
    """`await Connection.open(spec, bounds, owners)`; after `end`, or once `over`, it is of no use."""

    def __init__(
        self, spec: ServerSpec, bounds: Bounds, owners: Owners, how: Attempt, errors: IO[str] | None
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
            # We keep the list of tools ourselves, for servers of every revision.
            cache=None,
        )
        self._listing = Listing(bounds)
        self._ready = asyncio.Event()
        self._owner = asyncio.create_task(self._own(), name=f"mcp {spec.label}")
        self._owner.add_done_callback(lambda _: self._ready.set())
        owners.add(self._owner)
        self._owner.add_done_callback(owners.discard)

    @classmethod
    async def open(
        cls, spec: ServerSpec, bounds: Bounds, owners: Owners, errors: IO[str] | None = None
    ) -> "Connection":
        """Connect in the newest way that the server knows."""
        *others, last = attempts(spec)
        for how in others:
            try:
                return await cls(spec, bounds, owners, how, errors)._opened()
            except McpFailure as failure:
                if not may_be_older(how, failure):
                    raise
        return await cls(spec, bounds, owners, last, errors)._opened()

    async def _opened(self) -> "Connection":
        try:
            await self._ready.wait()
        except asyncio.CancelledError:
            self.end()
            raise
        if self.over:
            raise self._failure or closed(self._spec)
        return self

    @property
    def over(self) -> bool:
        return self._failure is not None or self._ending.is_set() or self._owner.done()

    def end(self) -> None:
        """Begin to leave; its owner is done when all is cleaned up."""
        self._ending.set()
        if not self._ready.is_set():
            self._scope.cancel()

    async def tools(self) -> list[McpTool]:
        if (known := self._listing.known()) is not None:
            return known
        return await self._asked(self._list(), "list its tools")

    async def call(self, name: str, arguments: dict[str, Any]) -> CallResult:
        call = Call(self._client.session, self._spec, self._list)
        result = await self._asked(call.run(name, arguments), "answer the call")
        return result_of(result, self._bounds.result_chars, self._spec)

    async def _list(self) -> list[McpTool]:
        return await self._listing.fetch(self._client.session, self._spec)

    async def _asked(self, question: Coroutine[Any, Any, T], what: str) -> T:
        """The answer, unless the connection ends or the time is up before it comes."""
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
                # Others who wait on this connection cannot be sure that nothing was done for them.
                self._lost(closed(self._spec))
                raise failure from None
            raise self._failure or failure from None
        finally:
            asking.cancel()
        if self.over:
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
        """Told by the transport, too, when the server is gone. The first reason is the one that counts."""
        self._failure = self._failure or failure
        self.end()

    async def _heard(self, message: IncomingMessage) -> None:
        if isinstance(message, wire.ToolListChangedNotification):
            self._listing.forget()


def _retrieve(asked: asyncio.Task[Any]) -> None:
    """An answer that nobody waits for any more may be an error; that is no news."""
    if not asked.cancelled():
        asked.exception()
