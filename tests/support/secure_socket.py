"""A WebSocket over TLS.

Not by the client of `websockets` that has threads: its two use one TLS object at once, and one handshake in a
hundred breaks, with the server of `websockets`, too.
"""

import asyncio
import ssl
from typing import Any

from websockets.asyncio.client import connect

SECONDS = 60


def first_answers(url: str, said: str, count: int, trusted: ssl.SSLContext, **options: Any) -> list[str]:
    """What comes first when something was said."""

    async def talk() -> list[str]:
        async with connect(url, ssl=trusted, open_timeout=SECONDS, proxy=None, **options) as client:
            await client.send(said)
            return [str(await asyncio.wait_for(client.recv(), SECONDS)) for _ in range(count)]

    return asyncio.run(talk())
