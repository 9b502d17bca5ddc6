"""One request on a connection of its own, to its end or until the client leaves."""

import asyncio
import time
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from tests.soak.fault import Fault
from tests.support.wire import RawReply, request


class Limits(Struct, frozen=True):
    silence_s: float = 30.0
    """A stream may be silent for so long."""
    whole_s: float = 120.0
    """A whole reply may take so long."""
    long_s: float = 400.0
    """A reply to a long prompt may take so long."""


class Departure(Struct, frozen=True):
    """When a client closes its connection: after some seconds, or some bytes of the reply."""

    seconds: float | None = None
    size: int | None = None


class Reply(Struct):
    heard: RawReply
    has_left: bool = False


async def exchange(
    url: str, path: str, body: dict[str, Any], silence_s: float, limit_s: float, departure: Departure | None
) -> Reply:
    """Raises a `Fault` where a reply does not come, stands still or has no end."""
    departure = departure or Departure()
    reply, began = Reply(RawReply()), time.monotonic()
    try:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    except OSError as error:
        raise Fault("broken", f"no connection: {error}") from error
    try:
        writer.write(request(url, path, body))
        await writer.drain()
        async with asyncio.timeout(departure.seconds):
            await _receive(reader, reply, departure.size, silence_s, began + limit_s)
    except OSError as error:
        # A timeout is one, too.
        if departure.seconds is None or not isinstance(error, TimeoutError):
            raise Fault("broken", repr(error), reply.heard.data) from error
        reply.has_left = True
    finally:
        writer.transport.abort()
    return reply


async def _receive(
    reader: asyncio.StreamReader, reply: Reply, most: int | None, silence_s: float, until: float
) -> None:
    heard = reply.heard
    while most is None or len(heard.data) < most:
        left = until - time.monotonic()
        part = await _read(reader, min(silence_s, max(left, 0.001)), heard)
        if not part:
            _check_end(heard)
            return
        heard.data += part
        if not heard.status and len(heard.data) >= 12:
            heard.status = int(heard.data[9:12])
    reply.has_left = True


async def _read(reader: asyncio.StreamReader, patience_s: float, heard: RawReply) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(1 << 16), patience_s)
    except TimeoutError:
        raise Fault("stuck", f"no byte for {patience_s:.1f} s", heard.data) from None


def _check_end(heard: RawReply) -> None:
    """Raises a `Fault` if the server closed the connection before the end of its reply."""
    head, _, rest = heard.data.partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    whole = rest.endswith(b"0\r\n\r\n")
    if length := lines.get(b"content-length"):
        whole = len(rest) == int(length)
    if not heard.status or not whole:
        raise Fault("unfinished", "the connection ended before the reply did", heard.data)
