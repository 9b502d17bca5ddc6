"""A server as requests use it: its connection is opened on first use, and anew after it ended."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import IO, TYPE_CHECKING, Any, TypeVar

from dragoman.mcp.spec import Bounds, CallResult, McpFailure, McpTool, ServerSpec

if TYPE_CHECKING:
    from dragoman.mcp.connection import Connection, Owners

T = TypeVar("T")
INVALID_PARAMS = -32602


class McpSession:
    """Raises nothing but McpFailure."""

    def __init__(self, spec: ServerSpec, bounds: Bounds, owners: "Owners", errors: IO[str] | None) -> None:
        self._spec = spec
        self._bounds = bounds
        self._owners = owners
        self._errors = errors
        self._opening: asyncio.Task[Connection] | None = None

    async def list_tools(self) -> list[McpTool]:
        # To ask this twice does no harm.
        return await self._ask(
            lambda connection: connection.tools(),
            lambda failure: failure.is_session_over or failure.kind == "unreachable",
        )

    async def call(self, name: str, arguments: dict[str, Any]) -> CallResult:
        return await self._ask(
            lambda connection: connection.call(name, arguments), lambda failure: failure.is_session_over
        )

    async def call_as_written(self, name: str, arguments: str) -> CallResult:
        """A call as a model wrote it: its arguments are JSON, or what it took for JSON."""
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise McpFailure("protocol", "The arguments of the call are not a JSON object.", INVALID_PARAMS)
        return await self.call(name, given)

    async def _ask(
        self, ask: Callable[["Connection"], Awaitable[T]], is_worth_a_new_one: Callable[[McpFailure], bool]
    ) -> T:
        was_open = self._is_open()
        try:
            return await ask(await self._connection())
        except McpFailure as failure:
            if not was_open or not is_worth_a_new_one(failure):
                raise
        return await ask(await self._connection())

    def _is_open(self) -> bool:
        """Or about to be."""
        if self._opening is None or self._opening.cancelled():
            return False
        if not self._opening.done():
            return True
        return self._opening.exception() is None and not self._opening.result().over

    async def _connection(self) -> "Connection":
        # The SDK is an extra, and slow to import.
        from dragoman.mcp.connection import Connection
        from dragoman.mcp.failures import closed

        if self._opening is None or not self._is_open():
            opened = Connection.open(self._spec, self._bounds, self._owners, self._errors)
            self._opening = asyncio.create_task(opened)
        opening = self._opening
        try:
            # Others may wait for the same connection.
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if opening.cancelled() and task is not None and not task.cancelling():
                raise closed(self._spec) from None
            raise

    def end(self) -> None:
        """Begin to leave; those who still wait for an answer get a failure."""
        if self._opening is None or not self._is_open():
            return
        if self._opening.done():
            self._opening.result().end()
        else:
            self._opening.cancel()
