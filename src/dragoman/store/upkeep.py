"""Operations on the whole store: make room, find what was left unfinished, count.

Room is made by those who have most: each loses its oldest until all that have more than a certain level are
down to it. So whoever has no more than an equal share of what the store holds loses nothing to the others.
"""

import asyncio
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from dragoman.store import conversation_operations, items, record_operations
from dragoman.store.items import BEYOND, Holder
from dragoman.store.records import Bounds, Item, Operation, Query, Record, Row, marks

AT_WORK = "status IN ('queued', 'in_progress')"
FINISHED = f"NOT {AT_WORK}"
BYTES = """SELECT CAST((SELECT coalesce(sum(size), 0) FROM records)
    + (SELECT coalesce(sum(size), 0) FROM conversations) AS BIGINT)"""
"""What everything takes, by our own count."""

BYTES_OF_OWNERS = """SELECT owner, CAST(sum(size) AS BIGINT) FROM (SELECT owner, size FROM records
    UNION ALL SELECT owner, size FROM conversations) AS everything GROUP BY owner"""
OWNERS = "SELECT owner FROM records UNION SELECT owner FROM conversations"

# A conversation is as old as its last change.
OLDEST = f"""SELECT 'records' AS kind, seq, size, created_at AS age FROM records
        WHERE owner = ? AND {FINISHED}
    UNION ALL SELECT 'conversations', seq, size, changed_at FROM conversations WHERE owner = ?
    ORDER BY age, seq LIMIT 256"""


SPARE = 256


def answer() -> Operation[None]:
    """Asks for something that costs nothing."""
    yield Query("SELECT 1 FROM records LIMIT 1")


def sweep(bounds: Bounds, measure: str, now: float) -> Operation[None]:
    """Drops what is too old, then as much until `measure`, a query for bytes, is within its bound."""
    if bounds.max_age is not None:
        before = now - bounds.max_age
        yield Query("DELETE FROM conversations WHERE changed_at < ?", (before,))
        yield Query(f"DELETE FROM records WHERE created_at < ? AND {FINISHED}", (before,))
    while bounds.max_bytes is not None:
        excess = (yield Query(measure))[0][0] - bounds.max_bytes
        if excess <= 0:
            return
        # A little more than is needed, so that not every write has to make room, and to add up all sizes.
        wanted = excess + bounds.max_bytes // SPARE
        victims: list[Row] = []
        for owner, surplus in surpluses(dict((yield Query(BYTES_OF_OWNERS))), wanted).items():
            victims += _oldest((yield Query(OLDEST, (owner, owner))), surplus)
        if not victims:
            return
        # Conversations first, as in `save`.
        for table in ("conversations", "records"):
            if seqs := [seq for kind, seq, *_ in victims if kind == table]:
                yield Query(f"DELETE FROM {table} WHERE seq IN ({marks(seqs)})", tuple(seqs))


def surpluses(bytes_of: Mapping[str, int], wanted: int) -> dict[str, int]:
    """What those who have most give up, so that it is as much as is wanted, and they all have as much then.

    `surpluses({"a": 10, "b": 7, "c": 2}, 5)` is `{"a": 4, "b": 1}`.
    """
    most = sorted(bytes_of.items(), key=lambda each: -each[1])
    total = 0
    for count, (_, size) in enumerate(most, 1):
        total += size
        level = max(0, -(-(total - wanted) // count))
        if count == len(most) or level >= most[count][1]:
            return {owner: size - level for owner, size in most[:count] if size > level}
    return {}


def owners() -> Operation[set[str]]:
    """Who has anything here."""
    return {row[0] for row in (yield Query(OWNERS))}


def _oldest(rows: Sequence[Row], excess: int) -> list[Row]:
    """As many of them, from the start, as make up for the excess."""
    chosen: list[Row] = []
    for row in rows:
        if excess <= 0:
            break
        chosen.append(row)
        excess -= row[2]
    return chosen


def unfinished_instances() -> Operation[set[str]]:
    """The servers that work, or worked, on unfinished records."""
    rows = yield Query(f"SELECT DISTINCT instance FROM records WHERE {AT_WORK}")
    return {row[0] for row in rows}


def adopt(dead: Sequence[str], instance: str) -> Operation[list[Record]]:
    """Takes over the unfinished records of servers that are gone, so that nobody else does."""
    if not dead:
        return []
    rows = yield Query(
        f"UPDATE records SET instance = ? WHERE {AT_WORK} AND instance IN ({marks(dead)}) RETURNING seq",
        (instance, *dead),
    )
    if not rows:
        return []
    seqs = tuple(row[0] for row in rows)
    query = f"SELECT {record_operations.COLUMNS} FROM records WHERE seq IN ({marks(seqs)}) ORDER BY seq"
    return (yield from record_operations.load((yield Query(query, seqs))))


def counts() -> Operation[tuple[dict[str, int], int, float | None]]:
    """How many there are of each kind, their bytes, and when the oldest was created."""
    rows = yield Query("SELECT kind, count(*) FROM records GROUP BY kind")
    found = {"response": 0, "chat": 0, **dict(rows)}
    for name, table in (("conversation", "conversations"), ("item", "items")):
        found[name] = (yield Query(f"SELECT count(*) FROM {table}"))[0][0]
    size = (yield Query(BYTES))[0][0]
    oldest = yield Query(
        """SELECT min(created_at) FROM (SELECT created_at FROM records
            UNION ALL SELECT created_at FROM conversations) AS everything"""
    )
    return found, size, oldest[0][0]


# Event logs are stored compressed: they repeat themselves, and few are ever read again.


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


# Everything there is as lines of JSON, a few at a time.


FEW = 50


def record_lines(after: int) -> Operation[tuple[list[bytes], int]]:
    """Lines for a few records after a place, and the place of the last of them."""
    rows = yield Query(
        f"SELECT {record_operations.COLUMNS}, events FROM records WHERE seq > ? ORDER BY seq LIMIT {FEW}",
        (after,),
    )
    records = yield from record_operations.load([row[:-1] for row in rows])
    lines = [_record_line(record, row[-1]) for record, row in zip(records, rows, strict=True)]
    return lines, rows[-1][0] if rows else after


def conversation_lines(after: int) -> Operation[tuple[list[bytes], int]]:
    rows = yield Query(
        f"""SELECT {conversation_operations.COLUMNS}, seq FROM conversations
            WHERE seq > ? ORDER BY seq LIMIT {FEW}""",
        (after,),
    )
    lines = []
    for *columns, seq in rows:
        facts = msgspec.structs.asdict(conversation_operations.made_of(columns))
        held = yield from items.page(facts["owner"], Holder("conversation", seq), None, BEYOND, False, BEYOND)
        lines.append(msgspec.json.encode({"type": "conversation", **facts, "items": _raw(held.data)}))
    return lines, rows[-1][-1] if rows else after


def _record_line(record: Record, events: bytes) -> bytes:
    facts = msgspec.structs.asdict(record)
    facts |= {"body": Raw(record.body), "inputs": _raw(record.inputs), "outputs": _raw(record.outputs)}
    # Not JSON, so it is written in base64.
    facts["events"] = unpack(events)
    return msgspec.json.encode({"type": "record", **facts})


def _raw(held: Iterable[Item]) -> list[dict[str, Any]]:
    # Trails, which few items have, are in base64 as well.
    return [
        {"id": item.id, "body": Raw(item.body), **({"trail": item.trail} if item.trail else {})}
        for item in held
    ]
