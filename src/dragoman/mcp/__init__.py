"""A client of MCP servers, for tools that the server calls itself. Independent of routes and APIs."""

from dragoman.mcp.servers import McpServers, McpSession
from dragoman.mcp.spec import CallResult, McpFailure, McpLimits, McpServerSpec, McpTool

__all__ = ["CallResult", "McpFailure", "McpLimits", "McpServerSpec", "McpServers", "McpSession", "McpTool"]
