"""SQL operations on the items of records and conversations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from msgspec import Struct

from dragoman.errors import CONVERSATION, BadRequest, BodyTooLarge, UnknownCursor
from dragoman.limits import check_count
from dragoman.store import media
from dragoman.store.records import (
    LONGEST_ID,
    Page,
    Query,
    ReadLimits,
    Row,
    SqlBatch,
    SqlOperation,
    StoredItem,
    marks,
)

T = TypeVar("T")

ROW_BYTES = 128
"""Bytes of a row besides its documents: keys, indexes, headers."""
BEYOND = 2**62
"""Larger than any `seq`."""
PAGE_BYTES = 4 * 1024 * 1024
"""A page ends before the entry that would make it larger; the first entry always fits."""
TRAIL_BYTES = 4 * 1024 * 1024
"""Bytes of trails that are read with items, latest first: continuing from ids needs the last ones."""
SQL_CHUNK = 500
"""Values in one IN list."""

COLUMNS = "seq, id, body, trail, shown"
WHOLE = "length(body) + coalesce(shown, 0)"
"""The size of a body with its media restored."""
SIZE = f"length(body) + coalesce(length(trail), 0) + length(id) + {ROW_BYTES}"
"""The size of an item, as `size_of` computes it."""
INSERT = """INSERT INTO items (owner, record, conversation, part, id, body, trail, shown)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""


def check_share(size: int, share: int | None) -> None:
    if share is not None and size > share:
        raise BodyTooLarge(
            f"This would take {size} bytes, and a key's share of the store is {share}: "
            "send less, or raise store_max_bytes.",
            code="store_share_exceeded",
        )


class ItemParent(Struct, frozen=True):
    """The parent of items: `ItemParent("record", 7, "input")`. All items of a conversation are one part."""

    column: str
    seq: int
    part: str = "item"

    def keys(self) -> tuple[int | None, int | None]:
        """Return the values of the columns `record` and `conversation`."""
        return (self.seq, None) if self.column == "record" else (None, self.seq)


def size_of(items: Iterable[StoredItem]) -> int:
    return sum(len(item.body) + len(item.trail) + len(item.id) + ROW_BYTES for item in items)


def size_of_shown(items: Iterable[StoredItem]) -> int:
    """Return the bytes of the items' media, each counted once."""
    fields = {digest: len(data) for item in items for digest, data in item.media.items()}
    return sum(fields.values())


def make_items(rows: Sequence[Sequence[Any]]) -> SqlOperation[list[StoredItem]]:
    """Build the items of rows of COLUMNS, with their media."""
    showing = [row[0] for row in rows if row[4]]
    fields = (yield from media.of_items(showing)) if showing else {}
    return [
        StoredItem(id, body, trail or b"", shown or 0, fields if shown else {})
        for _, id, body, trail, shown in rows
    ]


def insert(owner: str, holder: ItemParent, items: Sequence[StoredItem]) -> SqlOperation[None]:
    if any(len(item.id) > LONGEST_ID for item in items):
        raise BadRequest(f"The id of an item has at most {LONGEST_ID} characters.")
    rows = [
        (owner, *holder.keys(), holder.part, item.id, item.body, item.trail or None, item.shown or None)
        for item in items
    ]
    if not any(item.media for item in items):
        if rows:
            yield SqlBatch(INSERT, rows)
        return
    for item, row in zip(items, rows, strict=True):
        result = yield Query(INSERT + " RETURNING seq", row)
        yield from media.keep(owner, result[0][0], item.media)


def page(
    owner: str,
    holder: ItemParent,
    after: str | None,
    limit: int,
    descending: bool,
    most_bytes: int = PAGE_BYTES,
) -> SqlOperation[Page[StoredItem]]:
    where, values = f"{holder.column} = ? AND part = ?", (holder.seq, holder.part)
    start = BEYOND if descending else 0
    if after is not None:
        # If several items have this id, the last one in reading order is meant; otherwise paging would loop.
        last = "min" if descending else "max"
        # The owner is that of the parent; with it, the index finds the item without a scan.
        items = yield Query(
            f"SELECT {last}(seq) FROM items WHERE owner = ? AND id = ? AND {where}", (owner, after, *values)
        )
        if items[0][0] is None:
            raise UnknownCursor(after)
        start = items[0][0]
    beyond, order = ("<", "DESC") if descending else (">", "ASC")
    cut = f"FROM items WHERE {where} AND seq {beyond} ? ORDER BY seq {order} LIMIT ?"
    sizes = yield Query(f"SELECT {WHOLE} {cut}", (*values, start, limit + 1))
    fit = fitting(sizes[:limit], most_bytes)
    rows = yield Query(f"SELECT {COLUMNS} {cut}", (*values, start, fit))
    return Page((yield from make_items(rows)), has_more=len(sizes) > fit)


def fitting(sizes: Iterable[Row], most_bytes: int) -> int:
    """Return how many entries with these sizes fit on a page."""
    sums = accumulate(size for (size,) in sizes)
    return sum(1 for number, size in enumerate(sums) if not number or size <= most_bytes)


def of_records(seqs: Sequence[int]) -> SqlOperation[dict[tuple[int, str], list[StoredItem]]]:
    """Return the items of these records, by record and part."""
    rows = yield Query(
        f"SELECT record, part, {COLUMNS} FROM items WHERE record IN ({marks(seqs)}) ORDER BY seq",
        tuple(seqs),
    )
    items = yield from make_items([columns for _, _, *columns in rows])
    mapping: dict[tuple[int, str], list[StoredItem]] = {}
    for (record, part, *_), item in zip(rows, items, strict=True):
        mapping.setdefault((record, part), []).append(item)
    return mapping


def within(column: str, seqs: Sequence[int], most: ReadLimits) -> SqlOperation[list[StoredItem]]:
    """Return all items of these records in order, or of a conversation; too many are rejected before they are
    read.
    """
    sizes: list[tuple[int, int, int, int]] = []
    for some in batches(seqs):
        sizes += yield Query(
            f"""SELECT seq, length(body), coalesce(length(trail), 0), coalesce(shown, 0) FROM items
                WHERE {column} IN ({marks(some)}) LIMIT ?""",
            (*some, most.items + 1),
        )
        check_count(len(sizes), most.items, CONVERSATION, "items")
        check_stored(sum(size for _, size, *_ in sizes), sum(shown for *_, shown in sizes), most)
    since = _first_trail(sizes)
    rows: list[Row] = []
    for some in batches(seqs):
        rows += yield Query(
            f"""SELECT {column}, seq, id, body, CASE WHEN seq >= ? THEN trail END, shown FROM items
                WHERE {column} IN ({marks(some)})""",
            (since, *some),
        )
    order = {seq: number for number, seq in enumerate(seqs)}
    rows.sort(key=lambda row: (order[row[0]], row[1]))
    return (yield from make_items([row[1:] for row in rows]))


def check_stored(size: int, shown: int, most: ReadLimits) -> None:
    check_count(size, most.bytes, CONVERSATION, "bytes of stored items")
    check_count(shown, most.shown, CONVERSATION, "bytes of stored media, in base64,")


def _first_trail(sizes: Sequence[tuple[int, int, int, int]]) -> int:
    """Return the first item whose trail is read."""
    total, since = 0, BEYOND
    for seq, _, trail, _ in sorted(sizes, reverse=True):
        total += trail
        if total > TRAIL_BYTES:
            break
        since = seq
    return since


def batches(values: Sequence[T]) -> Iterator[Sequence[T]]:
    return (values[at : at + SQL_CHUNK] for at in range(0, len(values), SQL_CHUNK))


def find(owner: str, wanted: Mapping[str, int], most: ReadLimits) -> SqlOperation[list[StoredItem]]:
    """Return items of any record or conversation; if several have an id, the one stored last.

    `wanted` gives the number of references to each, as often as its bytes count.
    """
    indices: list[int] = []
    total = shown = 0
    for some in batches(list(wanted)):
        rows = yield Query(
            f"""SELECT id, seq, length(body), coalesce(shown, 0) FROM items WHERE seq IN (
                SELECT max(seq) FROM items WHERE owner = ? AND id IN ({marks(some)}) GROUP BY id)""",
            (owner, *some),
        )
        indices += [seq for _, seq, *_ in rows]
        total += sum(size * wanted[id] for id, _, size, _ in rows)
        shown += sum(size * wanted[id] for id, *_, size in rows)
        check_stored(total, shown, most)
    items: list[Row] = []
    for few in batches(indices):
        items += yield Query(
            f"SELECT seq, id, body, NULL, shown FROM items WHERE seq IN ({marks(few)})", tuple(few)
        )
    return (yield from make_items(items))
