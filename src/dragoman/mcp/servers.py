"""The MCP servers of an app, both configured ones and those named in requests, and what may be used: servers,
tools, and calls that need approval.

Whether a tool is read-only is the server's claim. For servers that are not trusted, name the allowed
tools.
"""

import asyncio
import hashlib
import importlib.util
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO, TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from dragoman.errors import TOOLS, BadRequest, SettingsError
from dragoman.mcp.spec import CallResult, McpFailure, McpLimits, McpServerSpec, McpTool
from dragoman.outbound import ADDRESS, ALLOWED, DEFAULT_PORTS, is_allowed, is_public, literal_address

if TYPE_CHECKING:
    from dragoman.mcp.connection import McpConnection, Owners

T = TypeVar("T")
INVALID_PARAMS = -32602


class McpSession:
    """Calls one server, connecting when needed. Raises only McpFailure."""

    def __init__(
        self, spec: McpServerSpec, bounds: McpLimits, owners: "Owners", errors: IO[str] | None
    ) -> None:
        self._spec = spec
        self._bounds = bounds
        self._owners = owners
        self._errors = errors
        self._opening: asyncio.Task[McpConnection] | None = None

    async def list_tools(self) -> list[McpTool]:
        # Listing twice does no harm, so it may be retried.
        return await self._ask(
            lambda connection: connection.tools(),
            lambda failure: failure.is_session_over or failure.kind == "unreachable",
        )

    async def call(self, name: str, arguments: dict[str, Any]) -> CallResult:
        return await self._ask(
            lambda connection: connection.call(name, arguments), lambda failure: failure.is_session_over
        )

    async def call_as_written(self, name: str, arguments: str) -> CallResult:
        """Call a tool with the arguments as the model wrote them, which may not be valid JSON."""
        try:
            result = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            result = None
        if not isinstance(result, dict):
            raise McpFailure("protocol", "The arguments of the call are not a JSON object.", INVALID_PARAMS)
        return await self.call(name, result)

    async def _ask(
        self, ask: Callable[["McpConnection"], Awaitable[T]], is_worth_a_new_one: Callable[[McpFailure], bool]
    ) -> T:
        was_open = self._is_open()
        try:
            return await ask(await self._connection())
        except McpFailure as failure:
            if not was_open or not is_worth_a_new_one(failure):
                raise
        return await ask(await self._connection())

    def _is_open(self) -> bool:
        """Whether the connection is open or being opened."""
        if self._opening is None or self._opening.cancelled():
            return False
        if not self._opening.done():
            return True
        return self._opening.exception() is None and not self._opening.result().is_closed

    async def _connection(self) -> "McpConnection":
        # The SDK is an optional dependency, and slow to import.
        from dragoman.mcp.connection import McpConnection
        from dragoman.mcp.transports import closed

        if self._opening is None or not self._is_open():
            opened = McpConnection.open(self._spec, self._bounds, self._owners, self._errors)
            self._opening = asyncio.create_task(opened)
        opening = self._opening
        try:
            # Other callers may wait for the same connection.
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if opening.cancelled() and task is not None and not task.cancelling():
                raise closed(self._spec) from None
            raise

    def end(self) -> None:
        """Begin to close; calls in progress fail."""
        if self._opening is None or not self._is_open():
            return
        if self._opening.done():
            self._opening.result().end()
        else:
            self._opening.cancel()


class McpServers:
    """The app's MCP servers. Connections to configured ones open on first use, are shared, and are reopened
    if they end.
    """

    def __init__(
        self,
        configured: Mapping[str, McpServerSpec] | None = None,
        allow: Sequence[str] = (),
        bounds: McpLimits | None = None,
        *,
        errors: IO[str] | None = None,
    ) -> None:
        """`errors` receives the standard error of server processes; without it, that output is discarded."""
        self._configured = dict(configured or {})
        self._allow = tuple(allow)
        self._bounds = bounds or McpLimits()
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
    ) -> McpServerSpec:
        """Return the server that a request names. Requests never start processes: these are only
        configured.
        """
        if url is not None:
            only_public = check_url(url, self._allow)
            if problem := header_problem(headers or {}, authorization):
                raise BadRequest(f"{problem[0].upper()}{problem[1:]}.", param=TOOLS)
            return McpServerSpec(
                label=label,
                url=url,
                headers=dict(headers or {}),
                authorization=authorization,
                only_public=only_public,
            )
        if label not in self._configured:
            known = (
                f"Configured servers: {', '.join(self.configured())}."
                if self._configured
                else "None is configured."
            )
            raise BadRequest(
                f"There is no configured MCP server {label}, and the request has no "
                f"server_url for it. {known}",
                param=TOOLS,
                code="mcp_server_not_found",
            )
        if headers or authorization:
            raise BadRequest(
                f"The MCP server {label} is configured by the operator: headers and "
                "authorization are only for servers with a URL.",
                param=TOOLS,
            )
        return self._configured[label]

    @asynccontextmanager
    async def session(self, spec: McpServerSpec) -> AsyncIterator[McpSession]:
        """Yield a session. It connects on first use, so entering never fails."""
        if self._configured.get(spec.label) == spec:
            yield self._shared.setdefault(spec.label, self._session(spec))
            return
        own = self._session(spec)
        try:
            yield own
        finally:
            own.end()

    def _session(self, spec: McpServerSpec) -> McpSession:
        return McpSession(spec, self._bounds, self._leaving, self._errors)

    async def close(self) -> None:
        """Close all connections and processes, and wait until they are gone."""
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


# Allowed tools and calls.


class ToolFilter(Struct, frozen=True, forbid_unknown_fields=True):
    """Matches tools for which all given conditions hold."""

    tool_names: list[str] | None = None
    read_only: bool | None = None

    @property
    def is_empty(self) -> bool:
        return self.tool_names is None and self.read_only is None

    def matches(self, tool: McpTool) -> bool:
        named = self.tool_names is None or tool.name in self.tool_names
        return named and (self.read_only is None or tool.read_only == self.read_only)


class ApprovalFilters(Struct, frozen=True, forbid_unknown_fields=True):
    always: ToolFilter | None = None
    never: ToolFilter | None = None


AllowedTools: TypeAlias = list[str] | ToolFilter | None
RequireApproval: TypeAlias = Literal["always", "never"] | ApprovalFilters | None


def allows_tool(tool: McpTool, allowed_tools: AllowedTools) -> bool:
    """Whether a tool is allowed. `None` allows all, as does `["*"]` in vLLM's API. A star approves
    nothing.
    """
    if isinstance(allowed_tools, list):
        return tool.name in allowed_tools or "*" in allowed_tools
    return allowed_tools is None or allowed_tools.matches(tool)


def needs_approval(tool: McpTool, policy: RequireApproval) -> bool:
    """Whether a call needs approval. The default is yes: without a policy, if both filters match, and if
    neither does.
    """
    if not isinstance(policy, ApprovalFilters):
        return policy != "never"
    if policy.always is not None and not policy.always.is_empty and policy.always.matches(tool):
        return True
    never = policy.never
    return never is None or never.is_empty or not never.matches(tool)


_ENCODER = msgspec.json.Encoder(order="sorted")


def pin_of(tool: McpTool) -> str:
    """Return the digest of a tool's description. An approval applies to the tool as it was described."""
    described = _ENCODER.encode([tool.name, tool.description, tool.input_schema])
    return hashlib.sha256(described).hexdigest()[:16]


# Allowed servers: those on the operator's allow list, over HTTP, with plain headers.


HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE = re.compile(r"[\t -~]*")
TOKEN = re.compile(r"[!-~]+")
# Headers of the HTTP message itself, which clients may not set.
OURS = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "accept-encoding"})


def check_allow(allow: Sequence[str]) -> None:
    """Raise for entries that could never match."""
    for entry in allow:
        if ALLOWED.fullmatch(entry) is None:
            raise SettingsError(f"`mcp_allow`: {entry} must be a host, HOST:PORT, HOST:* or *.")


def check_url(url: str, allow: Sequence[str]) -> bool:
    """Raise for a URL that is not allowed. Returns True for a host that only `*` allows, which must be
    public.
    """
    match = ADDRESS.fullmatch(url)
    if match is None:
        raise BadRequest(
            "An MCP server's URL must be http:// or https:// and a host, without a password.",
            param=TOOLS,
        )
    host = match["host"].lower()
    port = match["port"] or DEFAULT_PORTS[match["scheme"].lower()]
    named = is_allowed(host, port, [entry for entry in allow if entry != "*"])
    number = literal_address(host)
    if not named and ("*" not in allow or (number is not None and not is_public(number))):
        shown = host if match["port"] is None else f"{host}:{port}"
        raise BadRequest(
            f"This server may not use the MCP server at {shown}. Its operator can allow it with the setting "
            "`mcp_allow`.",
            param=TOOLS,
            code="mcp_server_not_allowed",
        )
    return not named


def header_problem(headers: Mapping[str, str], authorization: str | None = None) -> str | None:
    """Return what is wrong with these headers, or None. Values are never quoted: they may be secrets."""
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name) or name.lower() in OURS:
            return "a header for an MCP server has a name that may not be sent"
        if not HEADER_VALUE.fullmatch(value):
            return f"the header {name} for an MCP server has characters that may not be sent"
    if authorization is None:
        return None
    if not TOKEN.fullmatch(authorization):
        return "the `authorization` of an MCP server must be a bare token"
    if any(name.lower() == "authorization" for name in headers):
        return "an MCP server gets `authorization` or a header of that name, not both"
    return None
