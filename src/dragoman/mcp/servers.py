"""All MCP servers of an app, those that the operator configured and those that requests name; and what may be
used: which tools of a server, which calls after a person has approved, which servers.

Whether a tool only reads is what its server says of it. Where a server is not trusted, tools should be named.
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
from dragoman.mcp.spec import CallResult, McpBounds, McpFailure, McpTool, ServerSpec
from dragoman.outbound import ADDRESS, ALLOWED, DEFAULT_PORTS, is_allowed, is_public, written_as_number

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


# What may be used: tools and calls.


class ToolFilter(Struct, frozen=True, forbid_unknown_fields=True):
    """Matches a tool for which all that is given holds."""

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
    """`None` allows all, as does `["*"]` in vLLM's API. A star approves of nothing."""
    if isinstance(allowed_tools, list):
        return tool.name in allowed_tools or "*" in allowed_tools
    return allowed_tools is None or allowed_tools.matches(tool)


def needs_approval(tool: McpTool, policy: RequireApproval) -> bool:
    """In doubt, yes: where nothing is said, where both filters match, and where neither does."""
    if not isinstance(policy, ApprovalFilters):
        return policy != "never"
    if policy.always is not None and not policy.always.is_empty and policy.always.matches(tool):
        return True
    never = policy.never
    return never is None or never.is_empty or not never.matches(tool)


_ENCODER = msgspec.json.Encoder(order="sorted")


def pin_of(tool: McpTool) -> str:
    """What is approved is a call of a tool as it was described: another word of that, another pin."""
    described = _ENCODER.encode([tool.name, tool.description, tool.input_schema])
    return hashlib.sha256(described).hexdigest()[:16]


# What may be used: servers. Those of the operator's allow-list, over HTTP, with plain headers.


HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE = re.compile(r"[\t -~]*")
TOKEN = re.compile(r"[!-~]+")
# These say how a message is carried, which is not for a client to say.
OURS = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "accept-encoding"})


def check_allow(allow: Sequence[str]) -> None:
    """An entry that could never match would be a slip in silence."""
    for entry in allow:
        if ALLOWED.fullmatch(entry) is None:
            raise SettingsError(f"`mcp_allow`: {entry} must be a host, HOST:PORT, HOST:* or *.")


def check_url(url: str, allow: Sequence[str]) -> bool:
    """Refuses what is not allowed. True for a host that only `*` allows, which must be a public one."""
    found = ADDRESS.fullmatch(url)
    if found is None:
        raise BadRequest(
            "An MCP server's address must be http:// or https:// and a host, without a password in it.",
            param=TOOLS,
        )
    host = found["host"].lower()
    port = found["port"] or DEFAULT_PORTS[found["scheme"].lower()]
    named = is_allowed(host, port, [entry for entry in allow if entry != "*"])
    number = written_as_number(host)
    if not named and ("*" not in allow or (number is not None and not is_public(number))):
        shown = host if found["port"] is None else f"{host}:{port}"
        raise BadRequest(
            f"This server may not use the MCP server at {shown}. Its operator can allow it with the setting "
            "`mcp_allow`.",
            param=TOOLS,
            code="mcp_server_not_allowed",
        )
    return not named


def header_problem(headers: Mapping[str, str], authorization: str | None = None) -> str | None:
    """What is wrong with these headers, if anything. Never says a value: it may be a secret."""
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
