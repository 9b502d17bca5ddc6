"""Whom the server may ask elsewhere: what an address may be, and whether it is one that anybody may ask.

For MCP servers that requests name, and for pictures, sounds and files that are fetched for them. The order is
always this: an address is read by `ADDRESS`, compared with what the operator allows, and its host looked up
once. What is connected to is the number that was looked at: a moment later the name may stand for another.
"""

import asyncio
import re
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias

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
DEFAULT_PORTS = {"http": "80", "https": "443"}
ALLOWED = re.compile(r"\*|([a-z0-9.-]+|\[[0-9a-f:.]+\])(:(\d{1,5}|\*))?", re.IGNORECASE)


def is_allowed(host: str, port: str, allow: Sequence[str]) -> bool:
    """Entries are `host` (its usual ports), `host:port` or `host:*`."""
    forms = {f"{host}:{port}", f"{host}:*"}
    if port in DEFAULT_PORTS.values():
        forms.add(host)
    return any(entry.lower() in forms for entry in allow)
