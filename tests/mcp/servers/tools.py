"""A good MCP server: `python tools.py stdio|http|sse [PORT]`."""

import asyncio
import os
import sys

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ImageContent, ToolAnnotations

server = MCPServer("tools")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def fail() -> str:
    raise ValueError("it cannot be done")


@server.tool()
def die() -> str:
    os._exit(1)


if __name__ == "__main__":
    kind, *port = sys.argv[1:]
    if kind == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http" if kind == "http" else "sse", port=int(port[0]))
