"""The tools of a server, asked for page by page and kept for a while."""

import time

import mcp_types as wire
import msgspec
from mcp.client import ClientSession

from dragoman.mcp.failures import too_large
from dragoman.mcp.spec import Bounds, McpFailure, McpTool, ServerSpec


class Listing:
    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._tools: list[McpTool] | None = None
        self._until = 0.0
        self._changes = 0

    def known(self) -> list[McpTool] | None:
        return self._tools if time.monotonic() < self._until else None

    def forget(self) -> None:
        self._until = 0.0
        self._changes += 1

    async def fetch(self, session: ClientSession, spec: ServerSpec) -> list[McpTool]:
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
        # A change that was told of meanwhile may concern a page that is read already.
        if changes == self._changes:
            self._tools, self._until = tools, time.monotonic() + self._bounds.tools_age_s
        return tools


def tool_of(tool: wire.Tool) -> McpTool:
    hints = tool.annotations
    annotations = hints.model_dump(by_alias=True, exclude_none=True) if hints else None
    return McpTool(tool.name, tool.description, tool.input_schema, annotations)
