"""The client under test of the MCP conformance suite: `python mcp_client.py URL`, through our own room.

The suite names the scenario in the environment, and where it wants certain calls, those too.
"""

import asyncio
import json
import os
import sys
from typing import Any

from dragoman.mcp import McpFailure, McpServers, McpSession, McpTool

NUMBERS: dict[str, Any] = {"a": 5, "b": 3}


async def main(url: str) -> None:
    servers = McpServers(allow=["localhost:*", "127.0.0.1:*", "[::1]:*"])
    try:
        async with servers.session(servers.resolve("suite", url)) as session:
            tools = await session.list_tools()
            for name, arguments in wanted_calls(tools):
                await call(session, name, arguments)
    finally:
        await servers.close()


def wanted_calls(tools: list[McpTool]) -> list[tuple[str, dict[str, Any]]]:
    """Those that the scenario names, or else each tool once; it may want to see the schema that it sent."""
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
    if "toolCalls" in context:
        return [(one["name"], one.get("arguments", {})) for one in context["toolCalls"]]
    schemas = {tool.name: tool.input_schema for tool in tools}
    known = {"add_numbers": NUMBERS, "json_schema_echo": {"schema": schemas.get("json_schema_2020_12_tool")}}
    return [(tool.name, known.get(tool.name, {})) for tool in tools]


async def call(session: McpSession, name: str, arguments: dict[str, Any]) -> None:
    try:
        print(name, await session.call(name, arguments))
    except McpFailure as failure:
        # Some tools are there to fail; whether that was right is for the suite to say.
        print(name, failure.kind, failure.code, failure.message)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
