"""Event logs are stored compressed: they repeat themselves, and few are ever read again."""

import asyncio
import zlib

QUICK = 65536
"""Bytes that are dealt with on the spot; with more, the event loop does not wait."""
PIECE = 1024 * 1024


async def packed(events: bytes) -> bytes:
    if len(events) <= QUICK:
        return pack(events)
    return await asyncio.to_thread(pack, events)


async def unpacked(stored: bytes) -> bytes:
    return await asyncio.to_thread(unpack, stored) if stored else b""


def pack(events: bytes) -> bytes:
    return zlib.compress(events, 1) if events else b""


def unpack(stored: bytes) -> bytes:
    """In pieces that are joined, which lets other threads go on."""
    unpacking = zlib.decompressobj()
    pieces: list[bytes] = []
    while stored or (pieces and pieces[-1] and not unpacking.eof):
        pieces.append(unpacking.decompress(stored, PIECE))
        stored = unpacking.unconsumed_tail
    if pieces and not unpacking.eof:
        raise zlib.error("The packed events are cut short.")
    return b"".join(pieces)
