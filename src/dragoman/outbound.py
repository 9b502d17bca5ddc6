"""Which hosts the server may connect to on behalf of requests: syntax of URLs, and public addresses.

Used for MCP servers that requests name, and for images, audio and files fetched for them. The order is always
the same: parse the URL with `ADDRESS`, compare it with the operator's allow list, resolve its host once. The
server then connects to the resolved IP address, because a second lookup could give another one.
"""

import asyncio
import re
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address

_NAT64 = IPv6Network("64:ff9b::/96")


class NonPublicAddress(Exception):
    """The host resolves to an address of a private network, or to none."""


def is_public(address: Address) -> bool:
    """Whether an address is not loopback, private, link-local or reserved; an IPv4 address inside an IPv6 one
    decides.
    """
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = IPv4Address(int(address) % 2**32)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast


def literal_address(host: str) -> Address | None:
    """Return the address if the host is one: `127.0.0.1`, `[::1]`, but also `2130706433` and `0177.0.0.1`."""
    try:
        return ip_address(host.strip("[]"))
    except ValueError:
        pass
    try:
        # `inet_aton` reads every notation that a resolver would.
        return IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


async def public_address(host: str, port: int) -> str:
    """Resolve a host to one public address. Connect to that address: a second lookup could give another
    one.
    """
    try:
        items = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        raise NonPublicAddress from None
    addresses = [str(row[4][0]) for row in items]
    if not addresses or not all(is_public(ip_address(each)) for each in addresses):
        raise NonPublicAddress
    return addresses[0]


# Stricter than the URL standard, so that no two parsers can disagree about the host.
ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::(?P<port>\d{1,5}))?(?:[/?][!-~]*)?",
    re.IGNORECASE,
)
DEFAULT_PORTS = {"http": "80", "https": "443"}
ALLOWED = re.compile(r"\*|([a-z0-9.-]+|\[[0-9a-f:.]+\])(:(\d{1,5}|\*))?", re.IGNORECASE)


def is_allowed(host: str, port: str, allow: Sequence[str]) -> bool:
    """Whether the host and port match an entry: `host` (default ports), `host:port` or `host:*`."""
    forms = {f"{host}:{port}", f"{host}:*"}
    if port in DEFAULT_PORTS.values():
        forms.add(host)
    return any(entry.lower() in forms for entry in allow)
