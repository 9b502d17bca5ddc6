"""Everything there is as lines of JSON, a few at a time."""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw

from dragoman.store import conversation_operations, items, record_operations
from dragoman.store.items import BEYOND, Holder
from dragoman.store.operations import Operation, Query
from dragoman.store.packing import unpack
from dragoman.store.records import Item, Record

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
