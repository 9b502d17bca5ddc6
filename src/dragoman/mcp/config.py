"""The operator's file of MCP servers, in the format that other programs use.

    {"mcpServers": {
        "files": {"command": "npx", "args": ["..."], "env": {"KEY": "${KEY}"}},
        "search": {"url": "https://example.com/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}}
    }}

Any text may contain `${NAME}` or `${NAME:-default}`, replaced from the environment. Keys besides `mcpServers`
belong to other programs and are ignored.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
from msgspec import Struct, field

from dragoman.errors import SettingsError
from dragoman.mcp.servers import McpServers, header_problem
from dragoman.mcp.spec import McpLimits, McpServerSpec, Transport
from dragoman.outbound import ADDRESS
from dragoman.settings import Settings

VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")
HTTP: Mapping[str | None, Transport | None] = {
    None: None,
    "sse": "sse",
    "http": "http",
    "streamable-http": "http",
    "streamableHttp": "http",
}


class McpServerEntry(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["stdio", "http", "sse", "streamable-http", "streamableHttp"] | None = None
    command: str | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    disabled: bool = False
    description: str | None = None


class McpConfigFile(Struct, frozen=True):
    servers: dict[str, dict[str, Any]] = field(name="mcpServers")


def make_mcp_servers(settings: Settings, errors: IO[str] | None = None) -> McpServers:
    """Create the MCP servers that `mcp_config`, `mcp_allow` and `mcp_timeout` describe."""
    configured = read_config(settings.mcp_config, os.environ) if settings.mcp_config else {}
    bounds = McpLimits(call_s=settings.mcp_timeout, limits=settings.limits)
    return McpServers(configured, settings.mcp_allow, bounds, errors=errors)


def read_config(path: str, environ: Mapping[str, str]) -> dict[str, McpServerSpec]:
    """Read the servers of a file by label; raises a SettingsError that names the wrong entry."""
    try:
        file = msgspec.json.decode(Path(path).expanduser().read_bytes(), type=McpConfigFile)
    except OSError as error:
        raise SettingsError(f"`mcp_config`: {path} cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"`mcp_config`: {path} is not a valid file of MCP servers: {error}.") from error
    fields: dict[str, McpServerSpec] = {}
    for label, raw in file.servers.items():
        try:
            entry = msgspec.convert(expand(raw, environ), McpServerEntry)
            spec = spec_of(label, entry)
        except ValueError as error:
            raise SettingsError(f"`mcp_config`: mcpServers.{label} in {path}: {error}.") from error
        if not entry.disabled:
            fields[label] = spec
    return fields


def expand(value: Any, environ: Mapping[str, str]) -> Any:
    """Replace variables: `expand({"a": ["${B}"]}, {"B": "c"})` is `{"a": ["c"]}`."""
    match value:
        case str():
            return VARIABLE.sub(lambda match: _variable(match, environ), value)
        case list():
            return [expand(one, environ) for one in value]
        case dict():
            return {name: expand(one, environ) for name, one in value.items()}
    return value


def _variable(match: re.Match[str], environ: Mapping[str, str]) -> str:
    text = environ.get(match["name"], match["default"])
    if text is None:
        raise ValueError(f"the variable {match['name']} is not set")
    return text


def spec_of(label: str, entry: McpServerEntry) -> McpServerSpec:
    """Build the spec of a server, which has either a command or a URL."""
    if (entry.command is None) == (entry.url is None):
        raise ValueError("either `command` or `url` must be given")
    if entry.command is not None:
        if entry.headers or entry.type not in (None, "stdio"):
            raise ValueError("a server with `command` has no `headers` and is of type stdio")
        return McpServerSpec(
            label=label,
            command=entry.command,
            args=tuple(entry.args),
            env=entry.env,
            cwd=entry.cwd,
            transport="stdio",
        )
    if entry.args or entry.env or entry.cwd or entry.type == "stdio":
        raise ValueError("a server with `url` has no `args`, `env` or `cwd` and is not of type stdio")
    if entry.url is None or ADDRESS.fullmatch(entry.url) is None:
        raise ValueError("`url` must be http:// or https:// and a host, without a password in it")
    if (problem := header_problem(entry.headers)) is not None:
        raise ValueError(problem)
    return McpServerSpec(label=label, url=entry.url, headers=entry.headers, transport=HTTP[entry.type])
