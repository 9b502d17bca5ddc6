"""Operations on the items of records and conversations."""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from dragoman.errors import BadRequest, UnknownCursor
from dragoman.store.operations import Many, Operation, Query, marks
from dragoman.store.records import LONGEST_ID, Item, Page

ROW_BYTES = 128
"""What a row takes beside its documents: keys, indexes, headers."""
BEYOND = 2**62
"""After every seq there will ever be."""

COLUMNS = "id, body, trail"
INSERT = f"INSERT INTO items (owner, record, conversation, part, {COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)"


class Holder(Struct, frozen=True):
    """Whose items: `Holder("record", 7, "input")`. The items of a conversation are all of one part."""

    column: str
    seq: int
    part: str = "item"

    def keys(self) -> tuple[int | None, int | None]:
        """The values of the columns `record` and `conversation`."""
        return (self.seq, None) if self.column == "record" else (None, self.seq)


def size_of(items: Iterable[Item]) -> int:
    return sum(len(item.body) + len(item.trail) + len(item.id) + ROW_BYTES for item in items)


def made_of(row: Sequence[Any]) -> Item:
    """The item of a row of COLUMNS."""
    id, body, trail = row
    return Item(id, body, trail or b"")


def insert(owner: str, holder: Holder, items: Sequence[Item]) -> Operation[None]:
    if any(len(item.id) > LONGEST_ID for item in items):
        raise BadRequest(f"The id of an item has at most {LONGEST_ID} characters.")
    if items:
        rows = [
            (owner, *holder.keys(), holder.part, item.id, item.body, item.trail or None) for item in items
        ]
        yield Many(INSERT, rows)


def page(holder: Holder, after: str | None, limit: int, descending: bool) -> Operation[Page[Item]]:
    where, values = f"{holder.column} = ? AND part = ?", (holder.seq, holder.part)
    start = BEYOND if descending else 0
    if after is not None:
        # Of several with this id the last on the way is meant, or whoever pages would go in circles.
        last = "min" if descending else "max"
        found = yield Query(f"SELECT {last}(seq) FROM items WHERE {where} AND id = ?", (*values, after))
        if found[0][0] is None:
            raise UnknownCursor(after)
        start = found[0][0]
    beyond, order = ("<", "DESC") if descending else (">", "ASC")
    rows = yield Query(
        f"SELECT {COLUMNS} FROM items WHERE {where} AND seq {beyond} ? ORDER BY seq {order} LIMIT ?",
        (*values, start, limit + 1),
    )
    return Page([made_of(row) for row in rows[:limit]], has_more=len(rows) > limit)


def of_records(seqs: Sequence[int]) -> Operation[dict[tuple[int, str], list[Item]]]:
    """The items of these records, by record and part."""
    rows = yield Query(
        f"SELECT record, part, {COLUMNS} FROM items WHERE record IN ({marks(seqs)}) ORDER BY seq",
        tuple(seqs),
    )
    found: dict[tuple[int, str], list[Item]] = {}
    for record, part, *columns in rows:
        found.setdefault((record, part), []).append(made_of(columns))
    return found


def find(owner: str, id: str) -> Operation[bytes | None]:
    """The body of an item of any record or conversation; of several, that which was stored last."""
    rows = yield Query(
        "SELECT body FROM items WHERE owner = ? AND id = ? ORDER BY seq DESC LIMIT 1", (owner, id)
    )
    return rows[0][0] if rows else None
