"""List the configured MCP servers with their tools, or the error of each."""

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from dragoman.cli.exits import USAGE, CommandError
from dragoman.cli.parser import add_settings, read_settings
from dragoman.cli.terminal import table, visible
from dragoman.logs import Colorizer

if TYPE_CHECKING:
    from dragoman.mcp import McpServers, McpTool

SUMMARY = "list configured MCP servers and their tools"
EXAMPLE = """\
examples:
  dragoman mcp list --mcp-config servers.json
  dragoman mcp list --json                      for machines

The file has the common format {"mcpServers": {"NAME": {"command": "..."}}}; see docs/mcp.md. The standard
error of the servers is shown. The exit code is 1 if one did not answer.
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dragoman mcp list [flags]"
    parser.add_argument("action", metavar="list", choices=("list",), help="action")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_settings(parser, ("mcp",))


def run(args: argparse.Namespace) -> int:
    from dragoman.mcp.config import make_mcp_servers

    servers = make_mcp_servers(read_settings(args), errors=sys.stderr)
    if not servers.configured():
        raise CommandError(
            "No MCP server is configured.",
            "Configure some with --mcp-config FILE or the setting `mcp_config`.",
            exit_code=USAGE,
        )
    fields = asyncio.run(ask_all(servers))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(fields), indent=2).decode())
    else:
        print("\n\n".join(page(label, one, Colorizer(sys.stdout)) for label, one in fields.items()))
    return 1 if any("error" in one for one in fields.values()) else 0


async def ask_all(servers: "McpServers") -> dict[str, dict[str, Any]]:
    labels = servers.configured()
    try:
        return dict(zip(labels, await asyncio.gather(*(ask(servers, one) for one in labels)), strict=True))
    finally:
        await servers.close()


async def ask(servers: "McpServers", label: str) -> dict[str, Any]:
    """Query one server: `{"tools": [...]}`, or `{"error": "..."}`."""
    from dragoman.mcp import McpFailure

    async with servers.session(servers.resolve(label)) as session:
        try:
            return {"tools": await session.list_tools()}
        except McpFailure as failure:
            return {"error": failure.message}


def page(label: str, fields: dict[str, Any], paint: Colorizer) -> str:
    if "error" in fields:
        return f"{paint('bold', label)}\n{paint('red', visible(fields['error']))}"
    tools: list[McpTool] = fields["tools"]
    rows = [(one.name, "read-only" if one.read_only else "", summary(one)) for one in tools]
    listed = table(("tool", "", "what it does"), rows, paint) if rows else "no tools"
    return f"{paint('bold', label)}\n{listed}"


def summary(tool: "McpTool") -> str:
    """Return the first line of a tool's description."""
    return next(iter((tool.description or "").strip().splitlines()), "")
