"""A client of MCP servers, for tools that the server itself calls. Knows nothing of routes or APIs."""

from dragoman.mcp.servers import McpServers, McpSession
from dragoman.mcp.spec import CallResult, McpBounds, McpFailure, McpTool, ServerSpec

__all__ = ["CallResult", "McpBounds", "McpFailure", "McpServers", "McpSession", "McpTool", "ServerSpec"]
