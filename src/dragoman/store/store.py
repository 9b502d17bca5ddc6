"""The interface of the store, and operations on all of its contents.

Operations on single records and conversations have their own files. Eviction takes from the owners with the
most: each loses its oldest records until all of these owners are down to the same level. An owner with no
more than an equal share of the store loses nothing to the others.
"""

import asyncio
import time
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from dragoman.store import conversation_operations as conversations
from dragoman.store import items, media, record_operations
from dragoman.store.items import BEYOND, ItemParent
from dragoman.store.records import (
    ConversationAppend,
    Kind,
    Page,
    Query,
    ReadLimits,
    Record,
    ResponseChain,
    Row,
    SqlOperation,
    Stats,
    StoredConversation,
    StoredItem,
    StoreLimits,
    marks,
)

# Evict records, find unfinished ones, count.


AT_WORK = "status IN ('queued', 'in_progress')"
FINISHED = f"NOT {AT_WORK}"
BYTES = """SELECT CAST((SELECT coalesce(sum(size), 0) FROM records)
    + (SELECT coalesce(sum(size), 0) FROM conversations)
    + (SELECT coalesce(sum(size), 0) FROM media) AS BIGINT)"""
"""The size of everything, as the store counts it."""

BYTES_OF_OWNERS = """SELECT owner, CAST(sum(size) AS BIGINT) FROM (SELECT owner, size FROM records
    UNION ALL SELECT owner, size FROM conversations
    UNION ALL SELECT owner, size FROM media) AS everything GROUP BY owner"""
OWNERS = "SELECT owner FROM records UNION SELECT owner FROM conversations"

# The age of a conversation is that of its last change.
OLDEST = f"""SELECT 'records' AS kind, seq, size, created_at AS age FROM records
        WHERE owner = ? AND {FINISHED}
    UNION ALL SELECT 'conversations', seq, size, changed_at FROM conversations WHERE owner = ?
    ORDER BY age, seq LIMIT 256"""


SPARE = 256


def answer() -> SqlOperation[None]:
    """Run a trivial query, for health checks."""
    yield Query("SELECT 1 FROM records LIMIT 1")


def sweep(bounds: StoreLimits, measure: str, now: float) -> SqlOperation[None]:
    """Delete expired records, then evict until `measure`, a query for bytes, is within its limit."""
    if bounds.max_age is not None:
        before = now - bounds.max_age
        yield Query("DELETE FROM conversations WHERE changed_at < ?", (before,))
        yield Query(f"DELETE FROM records WHERE created_at < ? AND {FINISHED}", (before,))
    while bounds.max_bytes is not None:
        excess = (yield Query(measure))[0][0] - bounds.max_bytes
        if excess <= 0:
            return
        # Evict a little more than needed, so that not every write has to evict and to sum all sizes.
        wanted = excess + bounds.max_bytes // SPARE
        victims: list[Row] = []
        for owner, surplus in eviction_amounts(dict((yield Query(BYTES_OF_OWNERS))), wanted).items():
            oldest = yield from _with_shown((yield Query(OLDEST, (owner, owner))))
            victims += _oldest(oldest, surplus)
        if not victims:
            return
        # Conversations first, as in `save`: a fixed lock order.
        for table in ("conversations", "records"):
            if seqs := [seq for kind, seq, *_ in victims if kind == table]:
                yield Query(f"DELETE FROM {table} WHERE seq IN ({marks(seqs)})", tuple(seqs))


def eviction_amounts(bytes_of: Mapping[str, int], wanted: int) -> dict[str, int]:
    """Return how many bytes each of the largest owners loses, so that they end at the same level.

    `eviction_amounts({"a": 10, "b": 7, "c": 2}, 5)` is `{"a": 4, "b": 1}`.
    """
    most = sorted(bytes_of.items(), key=lambda each: -each[1])
    total = 0
    for count, (_, size) in enumerate(most, 1):
        total += size
        level = max(0, -(-(total - wanted) // count))
        if count == len(most) or level >= most[count][1]:
            return {owner: size - level for owner, size in most[:count] if size > level}
    return {}


def owners() -> SqlOperation[set[str]]:
    """Return all owners of records or conversations."""
    return {row[0] for row in (yield Query(OWNERS))}


def _with_shown(rows: Sequence[Row]) -> SqlOperation[list[Row]]:
    """Add the size of media to rows."""
    shown: dict[tuple[str, int], int] = {}
    for kind in ("records", "conversations"):
        seqs = [seq for each, seq, *_ in rows if each == kind]
        sizes = yield from media.size_of(kind[:-1], seqs)
        shown |= {(kind, seq): size for seq, size in sizes.items()}
    return [(kind, seq, size + shown.get((kind, seq), 0)) for kind, seq, size, *_ in rows]


def _oldest(rows: Sequence[Row], excess: int) -> list[Row]:
    """Return the first rows that together cover the excess."""
    chosen: list[Row] = []
    for row in rows:
        if excess <= 0:
            break
        chosen.append(row)
        excess -= row[2]
    return chosen


Wants: TypeAlias = Callable[[str, float], bool]
"""Whether a server adopts unfinished records of this model, the latest of which was created at this time."""


def find_unfinished() -> SqlOperation[list[Row]]:
    """Return server, model and latest creation time of unfinished records."""
    query = f"SELECT instance, model, max(created_at) FROM records WHERE {AT_WORK} GROUP BY instance, model"
    return [*(yield Query(query))]


def adopt(dead: Iterable[tuple[str, str]], instance: str) -> SqlOperation[list[Record]]:
    """Adopt the unfinished records of dead servers, so that no other server does."""
    rows: list[Row] = []
    for pair in sorted(dead):
        change = (
            f"UPDATE records SET instance = ? WHERE {AT_WORK} AND instance = ? AND model = ? RETURNING seq"
        )
        rows += yield Query(change, (instance, *pair))
    if not rows:
        return []
    seqs = tuple(row[0] for row in rows)
    query = f"SELECT {record_operations.COLUMNS} FROM records WHERE seq IN ({marks(seqs)}) ORDER BY seq"
    records = yield from record_operations.load((yield Query(query, seqs)))
    return [media.put_record_back(record) for record in records]


def counts() -> SqlOperation[tuple[dict[str, int], int, float | None]]:
    """Return the number of objects per kind, their bytes, and the creation time of the oldest."""
    rows = yield Query("SELECT kind, count(*) FROM records GROUP BY kind")
    fields = {"response": 0, "chat": 0, **dict(rows)}
    for name, table in (("conversation", "conversations"), ("item", "items")):
        fields[name] = (yield Query(f"SELECT count(*) FROM {table}"))[0][0]
    size = (yield Query(BYTES))[0][0]
    oldest = yield Query(
        """SELECT min(created_at) FROM (SELECT created_at FROM records
            UNION ALL SELECT created_at FROM conversations) AS everything"""
    )
    return fields, size, oldest[0][0]


# Event logs are stored compressed: they are repetitive, and few are ever read again.


INLINE_BYTES = 65536
"""Up to this many bytes are processed at once; more go to a thread, so as not to block the event loop."""
PIECE = 1024 * 1024


async def pack_log(events: bytes) -> bytes:
    if len(events) <= INLINE_BYTES:
        return pack(events)
    return await asyncio.to_thread(pack, events)


async def unpack_log(stored: bytes) -> bytes:
    return await asyncio.to_thread(unpack, stored) if stored else b""


def pack(events: bytes) -> bytes:
    return zlib.compress(events, 1) if events else b""


def unpack(stored: bytes) -> bytes:
    """Decompress in chunks that are then joined, which lets other threads run."""
    unpacking = zlib.decompressobj()
    pieces: list[bytes] = []
    while stored or (pieces and pieces[-1] and not unpacking.eof):
        pieces.append(unpacking.decompress(stored, PIECE))
        stored = unpacking.unconsumed_tail
    if pieces and not unpacking.eof:
        raise zlib.error("The packed events are cut short.")
    return b"".join(pieces)


# Export of everything as JSON lines, a few at a time.


SQL_CHUNK = 50


def record_lines(after: int) -> SqlOperation[tuple[list[bytes], int]]:
    """Return JSON lines of a few records after `after`, and the position of the last one."""
    rows = yield Query(
        f"SELECT {record_operations.COLUMNS}, events FROM records"
        f" WHERE seq > ? ORDER BY seq LIMIT {SQL_CHUNK}",
        (after,),
    )
    records = yield from record_operations.load([row[:-1] for row in rows])
    lines = [_record_line(record, row[-1]) for record, row in zip(records, rows, strict=True)]
    return lines, rows[-1][0] if rows else after


def conversation_lines(after: int) -> SqlOperation[tuple[list[bytes], int]]:
    rows = yield Query(
        f"""SELECT {conversations.COLUMNS}, seq FROM conversations
            WHERE seq > ? ORDER BY seq LIMIT {SQL_CHUNK}""",
        (after,),
    )
    lines = []
    for *columns, seq in rows:
        facts = msgspec.structs.asdict(conversations.make_conversation(columns))
        held = yield from items.page(
            facts["owner"], ItemParent("conversation", seq), None, BEYOND, False, BEYOND
        )
        lines.append(msgspec.json.encode({"type": "conversation", **facts, "items": _raw(held.data)}))
    return lines, rows[-1][-1] if rows else after


def _record_line(record: Record, events: bytes) -> bytes:
    facts = msgspec.structs.asdict(record)
    facts |= {"body": Raw(record.body), "inputs": _raw(record.inputs), "outputs": _raw(record.outputs)}
    # Not JSON, so they are encoded in base64.
    facts["events"] = unpack(events)
    return msgspec.json.encode({"type": "record", **facts})


def _raw(held: Iterable[StoredItem]) -> list[dict[str, Any]]:
    # Trails, which few items have, are in base64 as well.
    return [
        {"id": item.id, "body": Raw(item.body), **({"trail": item.trail} if item.trail else {})}
        for item in map(media.put_item_back, held)
    ]


# The store. Each method is one operation in one transaction. Every query includes the owner, so records of
# other owners do not exist for it.


T = TypeVar("T")


async def _take_out(stored_items: Sequence[StoredItem]) -> tuple[StoredItem, ...]:
    some = any(len(item.body) >= media.LEAST for item in stored_items)
    return await media.extract_media(stored_items) if some else tuple(stored_items)


async def _put_back(stored_items: list[StoredItem]) -> list[StoredItem]:
    return (
        await media.restore_media(stored_items) if any(item.media for item in stored_items) else stored_items
    )


async def _whole(page: Page[StoredItem] | None) -> Page[StoredItem] | None:
    return None if page is None else Page(await _put_back(page.data), page.has_more)


class Store(ABC):
    def __init__(self, bounds: StoreLimits, clock: Callable[[], float] | None = None) -> None:
        self.bounds = bounds
        self.instance = uuid.uuid4().hex
        """Identifies this process in the records that it works on."""
        self._clock = clock or time.time
        self._owners: set[str] = set()
        """Owners that have or recently had data here."""
        self._grown = 0
        """Bytes written since the last eviction, for stores that do not check at every write."""

    async def open(self) -> None:
        """Create or migrate the tables. Must be called before anything else."""
        try:
            await self._open()
            if self.bounds.max_bytes is not None:
                self._owners = await self._read(owners)
        except BaseException:
            await self.close()
            raise

    @abstractmethod
    async def _open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None:
        """Complete what was begun. May be called twice."""

    @abstractmethod
    async def vacuum(self) -> None:
        """Return free space in the database to the disk."""

    @abstractmethod
    async def stats(self) -> Stats: ...

    @abstractmethod
    async def adopt_orphans(self, wants: Wants = lambda *_: True) -> list[Record]:
        """Adopt and return the "queued" or "in_progress" records of servers that are gone."""

    @abstractmethod
    async def _read(self, make: Callable[[], SqlOperation[T]]) -> T: ...

    @abstractmethod
    async def _write(self, make: Callable[[], SqlOperation[T]], *, frees: bool = False) -> T:
        """Run an operation; returns when the change is on disk. With `frees`, it runs even if the disk is
        full.
        """

    async def check(self) -> None:
        """Raise StoreUnavailable if the database does not answer."""
        await self._read(answer)

    async def save(self, record: Record, append: ConversationAppend | None = None) -> None:
        """Store or replace a record and append to a conversation, in one transaction.

        Raises Conflict if the conversation is gone or has another version.
        """
        events = await pack_log(record.events)
        inputs, outputs = await _take_out(record.inputs), await _take_out(record.outputs)
        record = replace(record, inputs=inputs, outputs=outputs)
        if append is not None:
            append = replace(append, items=await _take_out(append.items))
        shown = items.size_of_shown((*inputs, *outputs, *(append.items if append else ())))
        most = self._admit(record.owner, record_operations.size_of(record, events) + shown)
        now = self._clock()
        await self._write(lambda: record_operations.save(record, events, self.instance, append, now, most))

    async def get(self, kind: Kind, owner: str, id: str, *, events: bool = False) -> Record | None:
        record, stored = await self._read(lambda: record_operations.get(kind, owner, id, events))
        if record is not None and any(item.media for item in (*record.inputs, *record.outputs)):
            record = await asyncio.to_thread(media.put_record_back, record)
        return replace(record, events=await unpack_log(stored)) if record and stored else record

    async def chain(self, owner: str, id: str, longest: int, most: ReadLimits) -> ResponseChain:
        """Return the items of a response and of all that it continues.

        Raises RecordNotFound for the first one that is missing, and ChainTooLong for more than `longest`.
        """
        response_chain = await self._read(lambda: record_operations.chain(owner, id, longest, most))
        return replace(response_chain, items=await _put_back(response_chain.items))

    async def lineage(self, owner: str, id: str, most: int, most_bytes: int = BEYOND) -> list[Record]:
        """Return a trajectory and those that it continues, as far as they exist, oldest first.

        Raises TrajectoryTooLarge if their bodies would exceed `most_bytes`.
        """
        records: list[Record] = []
        following: str | None = id
        left = most_bytes
        while following is not None and len(records) < most:
            record = await self._read(partial(record_operations.get_within, owner, following, left))
            if record is None:
                break
            records.append(record)
            following = record.previous
            left -= len(record.body)
        return records[::-1]

    async def delete(self, kind: Kind, owner: str, id: str) -> bool:
        return await self._write(lambda: record_operations.delete(kind, owner, id), frees=True)

    async def inputs(
        self,
        kind: Kind,
        owner: str,
        id: str,
        *,
        after: str | None = None,
        limit: int = 20,
        descending: bool = False,
    ) -> Page[StoredItem] | None:
        """Return a page of input items. Raises UnknownCursor if `after` is not the id of one."""
        return await _whole(
            await self._read(lambda: record_operations.inputs(kind, owner, id, after, limit, descending))
        )

    async def records(
        self,
        kind: Kind,
        owner: str,
        *,
        after: str | None = None,
        limit: int = 20,
        descending: bool = False,
        model: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Page[Record]:
        """Return a page of records with this model and all these metadata pairs, by creation, without their
        items.
        """
        return await self._read(
            lambda: record_operations.page(
                kind,
                owner,
                after=after,
                limit=limit,
                descending=descending,
                model=model,
                metadata=metadata or {},
            )
        )

    async def set_metadata(
        self, kind: Kind, owner: str, id: str, metadata: Mapping[str, str], body: bytes
    ) -> bool:
        """Set the metadata; `body` is the API object with the new metadata in it."""
        return await self._write(lambda: record_operations.set_metadata(kind, owner, id, metadata, body))

    async def create_conversation(
        self, conversation: StoredConversation, first: Sequence[StoredItem] = ()
    ) -> None:
        """Create a conversation. Raises Conflict if the id exists."""
        first = await _take_out(first)
        self._admit(conversation.owner, items.size_of(first) + items.size_of_shown(first))
        now = self._clock()
        await self._write(lambda: conversations.create(conversation, first, now))

    async def conversation(self, owner: str, id: str) -> StoredConversation | None:
        return await self._read(lambda: conversations.get(owner, id))

    async def set_conversation_metadata(self, owner: str, id: str, metadata: Mapping[str, str]) -> bool:
        now = self._clock()
        return await self._write(lambda: conversations.set_metadata(owner, id, metadata, now))

    async def delete_conversation(self, owner: str, id: str) -> bool:
        return await self._write(lambda: conversations.delete(owner, id), frees=True)

    async def add_items(
        self, owner: str, id: str, more: Sequence[StoredItem], version: int | None = None
    ) -> StoredConversation | None:
        """Append items and return the conversation, or None if it does not exist. Raises Conflict for another
        version.
        """
        more = await _take_out(more)
        most = self._admit(owner, items.size_of(more) + items.size_of_shown(more))
        now = self._clock()
        return await self._write(lambda: conversations.add_items(owner, id, more, version, now, most))

    async def conversation_items(
        self, owner: str, id: str, *, after: str | None = None, limit: int = 20, descending: bool = False
    ) -> Page[StoredItem] | None:
        """Return a page of items. Raises UnknownCursor if `after` is not the id of one."""
        return await _whole(
            await self._read(lambda: conversations.item_page(owner, id, after, limit, descending))
        )

    async def all_items(self, owner: str, id: str, most: ReadLimits) -> list[StoredItem] | None:
        """Return all items of a conversation, or None if it does not exist."""
        stored_items = await self._read(lambda: conversations.all_items(owner, id, most))
        return None if stored_items is None else await _put_back(stored_items)

    async def conversation_item(self, owner: str, id: str, item_id: str) -> StoredItem | None:
        item = await self._read(lambda: conversations.item(owner, id, item_id))
        return None if item is None else (await _put_back([item]))[0]

    async def delete_item(self, owner: str, id: str, item_id: str) -> bool:
        now = self._clock()
        return await self._write(lambda: conversations.delete_item(owner, id, item_id, now), frees=True)

    async def find_items(
        self, owner: str, wanted: Mapping[str, int], most: ReadLimits
    ) -> dict[str, StoredItem]:
        """Return items of any record or conversation; if several have an id, the one stored last.

        `wanted` gives the number of references to each, as often as its bytes count.
        """
        stored_items = await self._read(lambda: items.find(owner, wanted, most))
        return {item.id: item for item in await _put_back(stored_items)}

    async def export(self) -> AsyncIterator[bytes]:
        """Yield everything of every owner: a JSON line per record, then one per conversation."""
        for lines_after in (record_lines, conversation_lines):
            offset = 0
            while True:
                lines, offset = await self._read(lambda: lines_after(offset))  # noqa: B023
                if not lines:
                    break
                for line in lines:
                    yield line

    def _admit(self, owner: str, size: int) -> int | None:
        """Return the bytes that one object of this owner may take, None without a limit; raises if it takes
        more.

        A larger object would evict all other data of its owner, and finally itself.
        """
        self._grown += size
        if self.bounds.max_bytes is None:
            return None
        self._owners.add(owner)
        share = self.bounds.max_bytes // max(2, len(self._owners))
        items.check_share(size, share)
        return share
