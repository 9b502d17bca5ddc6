"""Tools that an MCP server has listed."""

from dragoman.mcp import McpTool


def listed_tool(name: str, description: str | None = None) -> McpTool:
    return McpTool(name, description, {"type": "object"})
