"""Records and conversations to store."""

from collections.abc import Sequence
from typing import Any

from dragoman.store import ReadLimits, Record, Store, StoredConversation, StoredItem

MOST = ReadLimits(items=1000, bytes=1_000_000)


def item(id: str, text: str = "") -> StoredItem:
    return StoredItem(id, b'{"text":"%s"}' % text.encode())


def record(id: str, **fields: Any) -> Record:
    return Record(
        **{
            "kind": "response",
            "id": id,
            "owner": "ann",
            "created_at": 1.0,
            "status": "completed",
            "model": "m",
            "body": b'{"id":"%s"}' % id.encode(),
            **fields,
        }
    )


def conversation(id: str = "c", **fields: Any) -> StoredConversation:
    return StoredConversation(**{"id": id, "owner": "ann", "created_at": 1.0, **fields})


def ids(entries: Sequence[StoredItem] | Sequence[Record]) -> list[str]:
    return [entry.id for entry in entries]


async def all_ids(store: Store, kind: Any = "response", owner: str = "ann") -> list[str]:
    texts: list[str] = []
    more = True
    while more:
        page = await store.records(kind, owner, after=texts[-1] if texts else None, limit=10_000)
        texts += ids(page.data)
        more = page.has_more
    return texts


async def read_body(store: Store, owner: str, id: str) -> bytes | None:
    stored_item = (await store.find_items(owner, {id: 1}, MOST)).get(id)
    return stored_item.body if stored_item else None


async def held(store: Store, id: str = "c") -> list[str]:
    page = await store.conversation_items("ann", id, limit=10_000)
    assert page is not None
    return ids(page.data)
