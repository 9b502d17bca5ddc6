"""Event logs are stored compressed: they repeat themselves, and few are ever read again."""

import asyncio
import zlib

QUICK = 65536
"""Bytes that are dealt with on the spot; with more, the event loop does not wait."""


async def packed(events: bytes) -> bytes:
    if len(events) <= QUICK:
        return pack(events)
    return await asyncio.to_thread(pack, events)


async def unpacked(stored: bytes) -> bytes:
    return await asyncio.to_thread(unpack, stored) if stored else b""


def pack(events: bytes) -> bytes:
    return zlib.compress(events, 1) if events else b""


def unpack(stored: bytes) -> bytes:
    return zlib.decompress(stored) if stored else b""
