"""Which servers a request may name: those of the operator's allow-list, over HTTP, with plain headers."""

import re
from collections.abc import Mapping, Sequence

from dragoman.errors import TOOLS, BadRequest, SettingsError
from dragoman.mcp.addresses import is_public, written_as_number

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
