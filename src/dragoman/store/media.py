"""Media of stored items: each image or audio clip is stored once per owner, however many items contain it.

An item is JSON with its media in base64. Before it is stored, long base64 is replaced by a marker, and the
bytes go to a separate table; when the item is read, the base64 is put back. The caller gets the item byte for
byte as it was stored.

    {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0..."}
    {"type": "input_image", "image_url": "data:image/png;base64,\xff<sha256>\xff"}

The marker begins and ends with a byte that JSON cannot contain, so clients cannot send one. A row counts the
items that use it, and a trigger deletes it with the last of them.
"""

import asyncio
import binascii
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256

from msgspec.structs import replace

from dragoman.store.records import Query, Record, Row, SqlOperation, StoredItem, marks

LEAST = 4096
"""Minimum of base64 characters that are stored separately."""
INLINE_BYTES = 65536
"""Up to this many bytes are processed at once; more go to a thread, so as not to block the event loop."""
SQL_CHUNK = 500
# The base64 prefixes of PNG, JPEG, GIF, WebP and WAV, MP3 (two variants), FLAC and PDF; other base64 stays.
_STARTS = rb"iVBORw|/9j/|R0lGOD|UklGR|SUQz|//|ZkxhQ|JVBERi"
_BASE64 = re.compile(rb'(?<=[",])(?=%s)[A-Za-z0-9+/]{%d,}={0,2}(?=")' % (_STARTS, LEAST))
_MARK = re.compile(rb"\xff([0-9a-f]{64})\xff")
UPSERT = """INSERT INTO media (owner, digest, size, uses, data) VALUES (?, ?, ?, 1, ?)
    ON CONFLICT (owner, digest) DO UPDATE SET uses = media.uses + 1 RETURNING seq"""
LINK = "INSERT INTO shown (item, media) VALUES (?, ?)"


async def extract_media(items: Sequence[StoredItem]) -> tuple[StoredItem, ...]:
    """Replace the media of items by markers, for the store."""
    if sum(len(item.body) for item in items) <= INLINE_BYTES:
        return tuple(map(_take_out, items))
    return await asyncio.to_thread(lambda: tuple(map(_take_out, items)))


def _take_out(item: StoredItem) -> StoredItem:
    if len(item.body) < LEAST:
        return item
    fields: dict[str, bytes] = {}

    def mark(match: re.Match[bytes]) -> bytes:
        try:
            data = binascii.a2b_base64(match[0], strict_mode=True)
        except ValueError:
            return match[0]
        if binascii.b2a_base64(data, newline=False) != match[0]:
            # This spelling of base64 could not be restored exactly.
            return match[0]
        digest = sha256(data).hexdigest()
        fields[digest] = data
        return b"\xff%s\xff" % digest.encode()

    body = _BASE64.sub(mark, item.body)
    return replace(item, body=body, shown=len(item.body) - len(body), media=fields) if fields else item


async def restore_media(items: Sequence[StoredItem]) -> list[StoredItem]:
    """Restore the media of items."""
    if sum(item.shown for item in items) <= INLINE_BYTES:
        return [*map(put_item_back, items)]
    return await asyncio.to_thread(lambda: [*map(put_item_back, items)])


def put_item_back(item: StoredItem) -> StoredItem:
    if not item.media:
        return item
    whole = _MARK.sub(
        lambda match: binascii.b2a_base64(item.media[match[1].decode()], newline=False), item.body
    )
    return replace(item, body=whole, media={})


def put_record_back(record: Record) -> Record:
    inputs, outputs = (tuple(map(put_item_back, held)) for held in (record.inputs, record.outputs))
    return replace(record, inputs=inputs, outputs=outputs)


# Operations.


def keep(owner: str, item: int, media: Mapping[str, bytes]) -> SqlOperation[None]:
    """Store media in a fixed order, so that transactions do not deadlock."""
    for digest in sorted(media):
        data = media[digest]
        rows = yield Query(UPSERT, (owner, digest, len(data), data))
        yield Query(LINK, (item, rows[0][0]))


def of_items(seqs: Sequence[int]) -> SqlOperation[dict[str, bytes]]:
    """Return the media of these items, by digest."""
    fields: dict[str, bytes] = {}
    for at in range(0, len(seqs), SQL_CHUNK):
        some = tuple(seqs[at : at + SQL_CHUNK])
        fields |= dict(
            (
                yield Query(
                    f"""SELECT digest, data FROM media WHERE seq IN (
                        SELECT media FROM shown WHERE item IN ({marks(some)}))""",
                    some,
                )
            )
        )
    return fields


def size_of(column: str, seqs: Sequence[int]) -> SqlOperation[dict[int, int]]:
    """Return the media bytes of records or conversations; shared media counts as a fraction for each user."""
    if not seqs or not (yield Query("SELECT 1 FROM media LIMIT 1")):
        return {}
    rows: list[Row] = yield Query(
        f"""SELECT {column}, CAST(sum(size / uses) AS BIGINT) FROM items
            JOIN shown ON shown.item = items.seq JOIN media ON media.seq = shown.media
            WHERE {column} IN ({marks(seqs)}) GROUP BY {column}""",
        tuple(seqs),
    )
    return dict(rows)
