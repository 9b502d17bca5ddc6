"""A client of MCP servers, for tools that the server calls itself. Independent of routes and APIs."""

from dragoman.mcp.servers import McpServers, McpSession
from dragoman.mcp.spec import CallResult, McpBounds, McpFailure, McpTool, ServerSpec

__all__ = ["CallResult", "McpBounds", "McpFailure", "McpServers", "McpSession", "McpTool", "ServerSpec"]
