"""Records and conversations to store."""

from collections.abc import Sequence
from typing import Any

from dragoman.store import Conversation, Item, Record, Store


def item(id: str, text: str = "") -> Item:
    return Item(id, b'{"text":"%s"}' % text.encode())


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


def conversation(id: str = "c", **fields: Any) -> Conversation:
    return Conversation(**{"id": id, "owner": "ann", "created_at": 1.0, **fields})


def ids(entries: Sequence[Item] | Sequence[Record]) -> list[str]:
    return [entry.id for entry in entries]


async def all_ids(store: Store, kind: Any = "response") -> list[str]:
    return ids((await store.records(kind, "ann", limit=10_000)).data)


async def held(store: Store, id: str = "c") -> list[str]:
    page = await store.conversation_items("ann", id, limit=10_000)
    assert page is not None
    return ids(page.data)
