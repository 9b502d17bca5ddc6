"""What may be used: which tools of a server, which calls after a person has approved, which servers.

Pure. Whether a tool only reads is what its server says of it. Where a server is not trusted, tools should
be named.
"""

import asyncio
import hashlib
import re
import socket
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from dragoman.errors import TOOLS, BadRequest, SettingsError
from dragoman.mcp.spec import McpTool

# Tools and calls.


class ToolFilter(Struct, frozen=True, forbid_unknown_fields=True):
    """Matches a tool for which all that is given holds."""

    tool_names: list[str] | None = None
    read_only: bool | None = None

    @property
    def is_empty(self) -> bool:
        return self.tool_names is None and self.read_only is None

    def matches(self, tool: McpTool) -> bool:
        named = self.tool_names is None or tool.name in self.tool_names
        return named and (self.read_only is None or tool.read_only == self.read_only)


class ApprovalFilters(Struct, frozen=True, forbid_unknown_fields=True):
    always: ToolFilter | None = None
    never: ToolFilter | None = None


AllowedTools: TypeAlias = list[str] | ToolFilter | None
RequireApproval: TypeAlias = Literal["always", "never"] | ApprovalFilters | None


def allows_tool(tool: McpTool, allowed_tools: AllowedTools) -> bool:
    """`None` allows all, as does `["*"]` in vLLM's API. A star approves of nothing."""
    if isinstance(allowed_tools, list):
        return tool.name in allowed_tools or "*" in allowed_tools
    return allowed_tools is None or allowed_tools.matches(tool)


def needs_approval(tool: McpTool, policy: RequireApproval) -> bool:
    """In doubt, yes: where nothing is said, where both filters match, and where neither does."""
    if not isinstance(policy, ApprovalFilters):
        return policy != "never"
    if policy.always is not None and not policy.always.is_empty and policy.always.matches(tool):
        return True
    never = policy.never
    return never is None or never.is_empty or not never.matches(tool)


_ENCODER = msgspec.json.Encoder(order="sorted")


def pin_of(tool: McpTool) -> str:
    """What is approved is a call of a tool as it was described: another word of that, another pin."""
    described = _ENCODER.encode([tool.name, tool.description, tool.input_schema])
    return hashlib.sha256(described).hexdigest()[:16]


# Servers: those of the operator's allow-list, over HTTP, with plain headers.


Address: TypeAlias = IPv4Address | IPv6Address

_NAT64 = IPv6Network("64:ff9b::/96")


class NotPublic(Exception):
    """The name of a host stands for an address of a private network, or for none."""


def is_public(address: Address) -> bool:
    """Not loopback, private, link-local or reserved; an IPv4 address within an IPv6 one is what counts."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = IPv4Address(int(address) % 2**32)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast


def written_as_number(host: str) -> Address | None:
    """The address that a host itself is: `127.0.0.1`, `[::1]`, and also `2130706433` and `0177.0.0.1`."""
    try:
        return ip_address(host.strip("[]"))
    except ValueError:
        pass
    try:
        # It reads all the forms that a resolver would.
        return IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


async def public_address(host: str, port: int) -> str:
    """An address of the host, to be connected to as it is: to ask again might give another answer."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        raise NotPublic from None
    addresses = [str(row[4][0]) for row in found]
    if not addresses or not all(is_public(ip_address(each)) for each in addresses):
        raise NotPublic
    return addresses[0]


# Narrower than what an address may be, so that no two readers of it can disagree about its host.
ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::(?P<port>\d{1,5}))?(?:[/?][!-~]*)?",
    re.IGNORECASE,
)
ALLOWED = re.compile(r"\*|([a-z0-9.-]+|\[[0-9a-f:.]+\])(:(\d{1,5}|\*))?", re.IGNORECASE)
DEFAULT_PORTS = {"http": "80", "https": "443"}
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE = re.compile(r"[\t -~]*")
TOKEN = re.compile(r"[!-~]+")
# These say how a message is carried, which is not for a client to say.
OURS = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "accept-encoding"})


def check_allow(allow: Sequence[str]) -> None:
    """An entry that could never match would be a slip in silence."""
    for entry in allow:
        if ALLOWED.fullmatch(entry) is None:
            raise SettingsError(f"`mcp_allow`: {entry} must be a host, HOST:PORT, HOST:* or *.")


def check_url(url: str, allow: Sequence[str]) -> bool:
    """Refuses what is not allowed. True for a host that only `*` allows, which must be a public one."""
    found = ADDRESS.fullmatch(url)
    if found is None:
        raise BadRequest(
            "An MCP server's address must be http:// or https:// and a host, without a password in it.",
            param=TOOLS,
        )
    host = found["host"].lower()
    port = found["port"] or DEFAULT_PORTS[found["scheme"].lower()]
    named = is_allowed(host, port, [entry for entry in allow if entry != "*"])
    number = written_as_number(host)
    if not named and ("*" not in allow or (number is not None and not is_public(number))):
        shown = host if found["port"] is None else f"{host}:{port}"
        raise BadRequest(
            f"This server may not use the MCP server at {shown}. Its operator can allow it with the setting "
            "`mcp_allow`.",
            param=TOOLS,
            code="mcp_server_not_allowed",
        )
    return not named


def is_allowed(host: str, port: str, allow: Sequence[str]) -> bool:
    """Entries are `host` (its usual ports), `host:port` or `host:*`."""
    forms = {f"{host}:{port}", f"{host}:*"}
    if port in DEFAULT_PORTS.values():
        forms.add(host)
    return any(entry.lower() in forms for entry in allow)


def header_problem(headers: Mapping[str, str], authorization: str | None = None) -> str | None:
    """What is wrong with these headers, if anything. Never says a value: it may be a secret."""
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name) or name.lower() in OURS:
            return "a header for an MCP server has a name that may not be sent"
        if not HEADER_VALUE.fullmatch(value):
            return f"the header {name} for an MCP server has characters that may not be sent"
    if authorization is None:
        return None
    if not TOKEN.fullmatch(authorization):
        return "the `authorization` of an MCP server must be a bare token"
    if any(name.lower() == "authorization" for name in headers):
        return "an MCP server gets `authorization` or a header of that name, not both"
    return None
