"""All MCP servers of an app: those that the operator configured, and those that requests name."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO

from dragoman.errors import TOOLS, BadRequest, SettingsError
from dragoman.mcp.resolve import check_allow, check_url, header_problem
from dragoman.mcp.session import McpSession
from dragoman.mcp.spec import Bounds, ServerSpec


class McpServers:
    """Connections to configured servers are opened on first use, shared, and opened anew after they ended."""

    def __init__(
        self,
        configured: Mapping[str, ServerSpec] | None = None,
        allow: Sequence[str] = (),
        bounds: Bounds | None = None,
        *,
        errors: IO[str] | None = None,
    ) -> None:
        """`errors` gets what the processes write to their standard error; without it, nobody does."""
        self._configured = dict(configured or {})
        self._allow = tuple(allow)
        self._bounds = bounds or Bounds()
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
