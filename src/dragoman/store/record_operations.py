"""SQL operations on records: responses, chat completions and trajectories."""

from collections.abc import Mapping, Sequence

import msgspec

from dragoman.errors import ChainTooLong, RecordNotFound, TrajectoryTooLarge, UnknownCursor
from dragoman.store import items
from dragoman.store.conversation_operations import append
from dragoman.store.items import ROW_BYTES, ItemParent
from dragoman.store.records import (
    ConversationAppend,
    Kind,
    Page,
    Query,
    ReadLimits,
    Record,
    ResponseChain,
    Row,
    SqlBatch,
    SqlOperation,
    StoredItem,
)

COLUMNS = "seq, kind, id, owner, created_at, status, model, metadata, previous, body"
THIS = "owner = ? AND kind = ? AND id = ?"

INSERT = """INSERT INTO records
    (owner, kind, id, created_at, status, model, previous, instance, size, metadata, body, events)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (owner, kind, id) DO UPDATE SET
        created_at = excluded.created_at, status = excluded.status, model = excluded.model,
        previous = excluded.previous, instance = excluded.instance, size = excluded.size,
        metadata = excluded.metadata, body = excluded.body, events = excluded.events
    RETURNING seq"""

# Reads one record more than the limit, to tell a chain that is too long from one that ends.
CHAIN = """WITH RECURSIVE chain (link, earlier, depth) AS (
        SELECT seq, previous, 1 FROM records WHERE owner = ? AND kind = 'response' AND id = ?
        UNION ALL
        SELECT records.seq, records.previous, depth + 1 FROM chain
            JOIN records ON owner = ? AND kind = 'response' AND id = earlier
            WHERE depth <= ?)
    SELECT link, earlier, status FROM chain JOIN records ON seq = link ORDER BY depth DESC"""


def size_of(record: Record, events: bytes) -> int:
    """Compute the size of a record in bytes; `events` as they are stored."""
    labels = sum(len(name) + len(value) + ROW_BYTES for name, value in record.metadata.items())
    own = len(record.body) + len(events) + len(record.id) + ROW_BYTES + 2 * labels
    return own + items.size_of(record.inputs) + items.size_of(record.outputs)


def save(
    record: Record,
    events: bytes,
    instance: str,
    more: ConversationAppend | None,
    now: float,
    most: int | None = None,
) -> SqlOperation[None]:
    """Store a record; `most` limits the bytes of its conversation."""
    # The conversation comes first here and in `sweep`: a fixed lock order prevents deadlocks.
    if more is not None:
        yield from append(record.owner, more, now, most)
    rows = yield Query(
        INSERT,
        (
            record.owner,
            record.kind,
            record.id,
            record.created_at,
            record.status,
            record.model,
            record.previous,
            instance,
            size_of(record, events),
            msgspec.json.encode(record.metadata),
            record.body,
            events,
        ),
    )
    seq = rows[0][0]
    yield Query("DELETE FROM items WHERE record = ?", (seq,))
    yield from items.insert(record.owner, ItemParent("record", seq, "input"), record.inputs)
    yield from items.insert(record.owner, ItemParent("record", seq, "output"), record.outputs)
    yield from _label(seq, record.metadata)


def _label(seq: int, metadata: Mapping[str, str]) -> SqlOperation[None]:
    yield Query("DELETE FROM labels WHERE record = ?", (seq,))
    if metadata:
        yield SqlBatch(
            "INSERT INTO labels (record, name, value) VALUES (?, ?, ?)",
            [(seq, *pair) for pair in metadata.items()],
        )


def get(kind: Kind, owner: str, id: str, events: bool) -> SqlOperation[tuple[Record | None, bytes]]:
    """Read a record, and its stored events if requested."""
    last = "events" if events else "NULL"
    rows = yield Query(f"SELECT {COLUMNS}, {last} FROM records WHERE {THIS}", (owner, kind, id))
    records = yield from load([row[:-1] for row in rows])
    return (records[0], rows[0][-1] or b"") if records else (None, b"")


def get_within(owner: str, id: str, most_bytes: int) -> SqlOperation[Record | None]:
    """Read a trajectory, unless it is larger than `most_bytes`."""
    this = (owner, "trajectory", id)
    sizes = yield Query(f"SELECT length(body) FROM records WHERE {THIS}", this)
    if not sizes:
        return None
    if sizes[0][0] > most_bytes:
        raise TrajectoryTooLarge
    rows = yield Query(f"SELECT {COLUMNS} FROM records WHERE {THIS}", this)
    return make_record(rows[0])


def load(rows: Sequence[Row]) -> SqlOperation[list[Record]]:
    """Build the records of rows of COLUMNS, with their items."""
    if not rows:
        return []
    mapping = yield from items.of_records([row[0] for row in rows])
    return [
        make_record(
            row, tuple(mapping.get((row[0], "input"), ())), tuple(mapping.get((row[0], "output"), ()))
        )
        for row in rows
    ]


def make_record(
    row: Row, inputs: tuple[StoredItem, ...] = (), outputs: tuple[StoredItem, ...] = ()
) -> Record:
    """Build the record of a row of COLUMNS."""
    _, kind, id, owner, created_at, status, model, metadata, previous, body = row
    return Record(
        kind=kind,
        id=id,
        owner=owner,
        created_at=created_at,
        status=status,
        model=model,
        metadata=msgspec.json.decode(metadata, type=dict[str, str]),
        previous=previous,
        body=body,
        inputs=inputs,
        outputs=outputs,
    )


def chain(owner: str, id: str, longest: int, most: ReadLimits) -> SqlOperation[ResponseChain]:
    links = yield Query(CHAIN, (owner, id, owner, longest))
    if len(links) > longest:
        raise ChainTooLong(longest)
    missing = links[0][1] if links else id
    if missing is not None:
        raise RecordNotFound(missing)
    stored_items = yield from items.within("record", [seq for seq, *_ in links], most)
    return ResponseChain(links[-1][2], stored_items)


def delete(kind: Kind, owner: str, id: str) -> SqlOperation[bool]:
    return bool((yield Query(f"DELETE FROM records WHERE {THIS} RETURNING seq", (owner, kind, id))))


def inputs(
    kind: Kind, owner: str, id: str, after: str | None, limit: int, descending: bool
) -> SqlOperation[Page[StoredItem] | None]:
    rows = yield Query(f"SELECT seq FROM records WHERE {THIS}", (owner, kind, id))
    if not rows:
        return None
    return (yield from items.page(owner, ItemParent("record", rows[0][0], "input"), after, limit, descending))


def page(
    kind: Kind,
    owner: str,
    *,
    after: str | None,
    limit: int,
    descending: bool,
    model: str | None,
    metadata: Mapping[str, str],
) -> SqlOperation[Page[Record]]:
    """Read a page of records in order of creation, without their items."""
    where, values = ["owner = ?", "kind = ?"], [owner, kind]
    if model is not None:
        where.append("model = ?")
        values.append(model)
    for pair in metadata.items():
        where.append("EXISTS (SELECT 1 FROM labels WHERE record = seq AND name = ? AND value = ?)")
        values.extend(pair)
    beyond, order = ("<", "DESC") if descending else (">", "ASC")
    position: Row = ()
    if after is not None:
        result = yield Query(f"SELECT created_at, seq FROM records WHERE {THIS}", (owner, kind, after))
        if not result:
            raise UnknownCursor(after)
        where.append(f"(created_at, seq) {beyond} (?, ?)")
        position = result[0]
    cut = f"FROM records WHERE {' AND '.join(where)} ORDER BY created_at {order}, seq {order} LIMIT ?"
    sizes = yield Query(f"SELECT length(body) {cut}", (*values, *position, limit + 1))
    fit = items.fitting(sizes[:limit], items.PAGE_BYTES)
    rows = yield Query(f"SELECT {COLUMNS} {cut}", (*values, *position, fit))
    return Page([make_record(row) for row in rows], has_more=len(sizes) > fit)


def set_metadata(
    kind: Kind, owner: str, id: str, metadata: Mapping[str, str], body: bytes
) -> SqlOperation[bool]:
    packed = msgspec.json.encode(metadata)
    rows = yield Query(
        f"""UPDATE records SET metadata = ?, body = ?, size = size + ? - length(metadata) - length(body)
            WHERE {THIS} RETURNING seq""",
        (packed, body, len(packed) + len(body), owner, kind, id),
    )
    if rows:
        yield from _label(rows[0][0], metadata)
    return bool(rows)
