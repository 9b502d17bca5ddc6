"""Operations on the whole store: make room, find what was left unfinished, count."""

from collections.abc import Sequence

from dragoman.store import record_operations
from dragoman.store.operations import Operation, Query, Row, marks
from dragoman.store.records import Bounds, Record

AT_WORK = "status IN ('queued', 'in_progress')"
FINISHED = f"NOT {AT_WORK}"
BYTES = """SELECT CAST((SELECT coalesce(sum(size), 0) FROM records)
    + (SELECT coalesce(sum(size), 0) FROM conversations) AS BIGINT)"""
"""What everything takes, by our own count."""

# A conversation is as old as its last change.
OLDEST = f"""SELECT 'records' AS kind, seq, size, created_at AS age FROM records WHERE {FINISHED}
    UNION ALL SELECT 'conversations', seq, size, changed_at FROM conversations
    ORDER BY age, seq LIMIT 256"""


SPARE = 256


def answer() -> Operation[None]:
    """Asks for something that costs nothing."""
    yield Query("SELECT 1 FROM records LIMIT 1")


def sweep(bounds: Bounds, measure: str, now: float) -> Operation[None]:
    """Drops what is too old, then the oldest until `measure`, a query for bytes, is within its bound."""
    if bounds.max_age is not None:
        before = now - bounds.max_age
        yield Query("DELETE FROM conversations WHERE changed_at < ?", (before,))
        yield Query(f"DELETE FROM records WHERE created_at < ? AND {FINISHED}", (before,))
    while bounds.max_bytes is not None:
        excess = (yield Query(measure))[0][0] - bounds.max_bytes
        if excess <= 0:
            return
        # A little more than is needed, so that not every write has to make room.
        victims = _oldest((yield Query(OLDEST)), excess + bounds.max_bytes // SPARE)
        if not victims:
            return
        # Conversations first, as in `save`.
        for table in ("conversations", "records"):
            if seqs := [seq for kind, seq, *_ in victims if kind == table]:
                yield Query(f"DELETE FROM {table} WHERE seq IN ({marks(seqs)})", tuple(seqs))


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
