"""A good MCP server, made with the SDK: `python tools.py stdio`, or `python tools.py http|sse PORT`."""

import base64
import sys

from mcp.server.mcpserver import MCPServer
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)

server = MCPServer("tools")
DATA = base64.b64encode(bytes(3000)).decode()


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail() -> CallToolResult:
    return CallToolResult(content=[TextContent(text="it cannot be done")], is_error=True)


@server.tool()
def parts() -> CallToolResult:
    """One part of each kind."""
    blob = BlobResourceContents(uri="file:///b", blob=DATA)
    content: list[ContentBlock] = [
        TextContent(text="first"),
        ImageContent(data=DATA, mime_type="image/png"),
        AudioContent(data=DATA, mime_type="audio/wav"),
        ResourceLink(name="page", uri="https://example.com/page"),
        EmbeddedResource(resource=TextResourceContents(uri="file:///a", text="inside")),
        EmbeddedResource(resource=blob),
    ]
    return CallToolResult(content=content, structured_content={"not": "shown"})


@server.tool()
def show(data: str, sound: str = "") -> CallToolResult:
    """A picture between two texts, and a sound behind them."""
    content: list[ContentBlock] = [
        TextContent(text="before"),
        ImageContent(data=data, mime_type="image/png"),
        TextContent(text="behind"),
        *([AudioContent(data=sound, mime_type="audio/wav")] if sound else ()),
    ]
    return CallToolResult(content=content)


@server.tool()
def structured() -> CallToolResult:
    return CallToolResult(content=[], structured_content={"degrees": 21})


if __name__ == "__main__":
    kind, *port = sys.argv[1:]
    if kind == "stdio":
        server.run("stdio")
    elif kind == "http":
        server.run("streamable-http", port=int(port[0]))
    else:
        server.run("sse", port=int(port[0]))
