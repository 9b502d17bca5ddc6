"""SQL operations on conversations."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.errors import Conflict
from dragoman.store import items, media
from dragoman.store.items import ROW_BYTES, ItemParent
from dragoman.store.records import (
    ConversationAppend,
    Page,
    Query,
    ReadLimits,
    SqlOperation,
    StoredConversation,
    StoredItem,
)

COLUMNS = "id, owner, created_at, metadata, version"
THIS = "owner = ? AND id = ?"
# The owner is that of the conversation; with it, the index finds an item without a scan.
NAMED = "owner = ? AND id = ? AND conversation = ?"


def create(conversation: StoredConversation, first: Sequence[StoredItem], now: float) -> SqlOperation[None]:
    packed = msgspec.json.encode(conversation.metadata)
    rows = yield Query(
        """INSERT INTO conversations (owner, id, created_at, changed_at, version, size, metadata)
            VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (owner, id) DO NOTHING RETURNING seq""",
        (
            conversation.owner,
            conversation.id,
            conversation.created_at,
            now,
            conversation.version,
            len(packed) + ROW_BYTES + items.size_of(first),
            packed,
        ),
    )
    if not rows:
        raise Conflict(f"There already is a conversation {conversation.id}.")
    yield from items.insert(conversation.owner, ItemParent("conversation", rows[0][0]), first)


def get(owner: str, id: str) -> SqlOperation[StoredConversation | None]:
    rows = yield Query(f"SELECT {COLUMNS} FROM conversations WHERE {THIS}", (owner, id))
    return make_conversation(rows[0]) if rows else None


def make_conversation(row: Sequence[Any]) -> StoredConversation:
    """Build the conversation of a row of COLUMNS."""
    id, owner, created_at, metadata, version = row
    return StoredConversation(
        id=id,
        owner=owner,
        created_at=created_at,
        metadata=msgspec.json.decode(metadata, type=dict[str, str]),
        version=version,
    )


def _holder(owner: str, id: str) -> SqlOperation[ItemParent | None]:
    rows = yield Query(f"SELECT seq FROM conversations WHERE {THIS}", (owner, id))
    return ItemParent("conversation", rows[0][0]) if rows else None


def append(owner: str, more: ConversationAppend, now: float, most: int | None = None) -> SqlOperation[None]:
    """Add items; raises if the version has changed, or if the conversation would exceed `most` bytes."""
    grown = items.size_of(more.items)
    holder = yield from _change(owner, more.conversation, more.version, grown, now, most)
    if holder is None:
        raise Conflict(
            f"The conversation {more.conversation} was changed or deleted in the meantime; read it again."
        )
    yield from items.insert(owner, holder, more.items)
    if most is not None and any(item.media for item in more.items):
        shown = yield from media.size_of("conversation", [holder.seq])
        sizes = yield Query("SELECT size FROM conversations WHERE seq = ?", (holder.seq,))
        items.check_share(sizes[0][0] + sum(shown.values()), most)


def add_items(
    owner: str, id: str, more: Sequence[StoredItem], version: int | None, now: float, most: int | None = None
) -> SqlOperation[StoredConversation | None]:
    if (yield from _holder(owner, id)) is None:
        return None
    yield from append(owner, ConversationAppend(id, version, tuple(more)), now, most)
    return (yield from get(owner, id))


def _change(
    owner: str, id: str, version: int | None, grown: int, now: float, most: int | None = None
) -> SqlOperation[ItemParent | None]:
    """Increment the version, if it is still this one; None matches any."""
    rows = yield Query(
        f"""UPDATE conversations SET version = version + 1, changed_at = ?, size = size + ?
            WHERE {THIS} AND version = coalesce(?, version) RETURNING seq, size""",
        (now, grown, owner, id, version),
    )
    if not rows:
        return None
    seq, size = rows[0]
    items.check_share(size, most)
    return ItemParent("conversation", seq)


def set_metadata(owner: str, id: str, metadata: Mapping[str, str], now: float) -> SqlOperation[bool]:
    packed = msgspec.json.encode(metadata)
    rows = yield Query(
        f"""UPDATE conversations SET metadata = ?, changed_at = ?, size = size + ? - length(metadata)
            WHERE {THIS} RETURNING seq""",
        (packed, now, len(packed), owner, id),
    )
    return bool(rows)


def delete(owner: str, id: str) -> SqlOperation[bool]:
    return bool((yield Query(f"DELETE FROM conversations WHERE {THIS} RETURNING seq", (owner, id))))


def item_page(
    owner: str, id: str, after: str | None, limit: int, descending: bool
) -> SqlOperation[Page[StoredItem] | None]:
    holder = yield from _holder(owner, id)
    return None if holder is None else (yield from items.page(owner, holder, after, limit, descending))


def all_items(owner: str, id: str, most: ReadLimits) -> SqlOperation[list[StoredItem] | None]:
    holder = yield from _holder(owner, id)
    return None if holder is None else (yield from items.within(holder.column, [holder.seq], most))


def item(owner: str, id: str, item_id: str) -> SqlOperation[StoredItem | None]:
    holder = yield from _holder(owner, id)
    if holder is None:
        return None
    rows = yield Query(
        f"SELECT {items.COLUMNS} FROM items WHERE {NAMED} ORDER BY seq DESC LIMIT 1",
        (owner, item_id, holder.seq),
    )
    stored_items = yield from items.make_items(rows)
    return stored_items[0] if stored_items else None


def delete_item(owner: str, id: str, item_id: str, now: float) -> SqlOperation[bool]:
    holder = yield from _holder(owner, id)
    if holder is None:
        return False
    rows = yield Query(
        f"DELETE FROM items WHERE seq IN (SELECT seq FROM items WHERE {NAMED}) RETURNING {items.SIZE}",
        (owner, item_id, holder.seq),
    )
    if rows:
        yield from _change(owner, id, None, -sum(size for (size,) in rows), now)
    return bool(rows)
