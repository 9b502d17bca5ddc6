"""All MCP servers of an app: those that the operator configured, and those that requests name."""

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO, TYPE_CHECKING, Any, TypeVar

from dragoman.errors import TOOLS, BadRequest, SettingsError
from dragoman.mcp.policy import check_allow, check_url, header_problem
from dragoman.mcp.spec import CallResult, McpBounds, McpFailure, McpTool, ServerSpec

if TYPE_CHECKING:
    from dragoman.mcp.connection import Connection, Owners

T = TypeVar("T")
INVALID_PARAMS = -32602


class McpSession:
    """Raises nothing but McpFailure."""

    def __init__(self, spec: ServerSpec, bounds: McpBounds, owners: "Owners", errors: IO[str] | None) -> None:
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
        from dragoman.mcp.transports import closed

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


class McpServers:
    """Connections to configured servers are opened on first use, shared, and opened anew after they ended."""

    def __init__(
        self,
        configured: Mapping[str, ServerSpec] | None = None,
        allow: Sequence[str] = (),
        bounds: McpBounds | None = None,
        *,
        errors: IO[str] | None = None,
    ) -> None:
        """`errors` gets what the processes write to their standard error; without it, nobody does."""
        self._configured = dict(configured or {})
        self._allow = tuple(allow)
        self._bounds = bounds or McpBounds()
        self._errors = errors
        self._shared: dict[str, McpSession] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        check_allow(self._allow)
        if self._configured or self._allow:
            check_installed()

    def configured(self) -> list[str]:
        return sorted(self._configured)

    def resolve(
        self,
        label: str,
        url: str | None = None,
        headers: Mapping[str, str] | None = None,
        authorization: str | None = None,
    ) -> ServerSpec:
        """The server that a request means. A request never starts a process: those are only configured."""
        if url is not None:
            only_public = check_url(url, self._allow)
            if problem := header_problem(headers or {}, authorization):
                raise BadRequest(f"{problem[0].upper()}{problem[1:]}.", param=TOOLS)
            return ServerSpec(
                label=label,
                url=url,
                headers=dict(headers or {}),
                authorization=authorization,
                only_public=only_public,
            )
        if label not in self._configured:
            known = f"It has {', '.join(self.configured())}." if self._configured else "It has none."
            raise BadRequest(
                f"This server has no MCP server {label} of its own, and no address was given. {known}",
                param=TOOLS,
                code="mcp_server_not_found",
            )
        if headers or authorization:
            raise BadRequest(
                f"The MCP server {label} is this server's own: headers and authorization go with an address.",
                param=TOOLS,
            )
        return self._configured[label]

    @asynccontextmanager
    async def session(self, spec: ServerSpec) -> AsyncIterator[McpSession]:
        """Connects on first use, so that entering never fails."""
        if self._configured.get(spec.label) == spec:
            yield self._shared.setdefault(spec.label, self._session(spec))
            return
        own = self._session(spec)
        try:
            yield own
        finally:
            own.end()

    def _session(self, spec: ServerSpec) -> McpSession:
        return McpSession(spec, self._bounds, self._leaving, self._errors)

    async def close(self) -> None:
        """End all connections and processes, and wait until they are gone."""
        for session in self._shared.values():
            session.end()
        self._shared.clear()
        if self._leaving:
            await asyncio.wait(self._leaving)


def check_installed() -> None:
    if importlib.util.find_spec("mcp") is None:
        raise SettingsError(
            "MCP servers are configured or allowed, but the MCP SDK is missing: pip install 'dragoman[mcp]'."
        )
