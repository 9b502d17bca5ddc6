"""HTTP by hand, for clients that leave in the middle of anything, by the hundred in one thread."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct


class RawReply(Struct):
    """What came back, as far as it was read."""

    status: int = 0
    data: bytes = b""
    """All bytes, heads and lengths of chunks included."""
    first_s: float = 0.0
    """From the last byte that was sent to the first that came."""

    @property
    def head(self) -> bytes:
        return self.data.partition(b"\r\n\r\n")[0]

    @property
    def body(self) -> bytes:
        """With the lengths of its chunks taken out."""
        head, _, rest = self.data.partition(b"\r\n\r\n")
        if b"chunked" not in head:
            return rest
        body = b""
        while rest:
            length, _, rest = rest.partition(b"\r\n")
            size = int(length, 16)
            body, rest = body + rest[:size], rest[size + 2 :]
        return body


def request(url: str, path: str, body: dict[str, Any], **headers: str) -> bytes:
    raw = json.dumps(body).encode()
    usual = {"host": urlsplit(url).netloc, "content-type": "application/json", "connection": "close"}
    named = {**usual, **headers, "content-length": str(len(raw))}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join([*lines, "", ""]).encode() + raw


async def ask(
    url: str, sent: bytes, *, most: int | None = None, patience: float | None = None, cut: int | None = None
) -> RawReply:
    """Sends something and reads the answer, or leaves: after some bytes of either, or after some seconds."""
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    heard = RawReply()
    try:
        writer.write(sent[:cut])
        await writer.drain()
        if cut is None:
            async with asyncio.timeout(patience):
                await _read(reader, heard, most)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return heard


async def _read(reader: asyncio.StreamReader, heard: RawReply, most: int | None) -> None:
    began = time.perf_counter()
    while most is None or len(heard.data) < most:
        part = await reader.read(1 << 16 if most is None else most - len(heard.data))
        if not part:
            return
        if not heard.data:
            heard.first_s = time.perf_counter() - began
        heard.data += part
        if not heard.status and len(heard.data) >= 12:
            heard.status = int(heard.data[9:12])


async def some_at_once(work: Callable[[], Awaitable[None]], count: int, at_once: int) -> None:
    """Does it so many times, and begins the next when one is done."""
    left = iter(range(count))

    async def one_after_the_other() -> None:
        for _ in left:
            await work()

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
