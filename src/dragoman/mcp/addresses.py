"""Which addresses belong to everybody. A server that any host may be must not be one of our own network."""

import asyncio
import socket
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
