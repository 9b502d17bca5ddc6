"""What a store does, in plain Python: lists and dictionaries, no database."""

from collections.abc import Mapping, Sequence
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

from dragoman.errors import ChainTooLong, Conflict, RecordNotFound, UnknownCursor
from dragoman.limits import check_count
from dragoman.store import (
    ConversationAppend,
    Page,
    ReadLimits,
    Record,
    ResponseChain,
    StoredConversation,
    StoredItem,
)
from dragoman.store.records import Kind


class HeldConversation(Struct):
    conversation: StoredConversation
    items: list[tuple[int, StoredItem]]


class Model:
    """Every item has the number of its storing beside it, for `find_items`."""

    def __init__(self) -> None:
        self.numbers = count()
        self.stored: dict[tuple[str, str, str], Record] = {}
        self.items: dict[tuple[str, str, str], list[tuple[int, StoredItem]]] = {}
        self.held: dict[tuple[str, str], HeldConversation] = {}

    def numbered(self, items: Sequence[StoredItem]) -> list[tuple[int, StoredItem]]:
        return [(next(self.numbers), item) for item in items]

    def save(self, record: Record, append: ConversationAppend | None = None) -> None:
        if append is not None:
            held = self.held.get((record.owner, append.conversation))
            if held is None or append.version not in (None, held.conversation.version):
                raise Conflict("")
            self.add_items(record.owner, append.conversation, append.items)
        key = (record.owner, record.kind, record.id)
        self.stored[key] = record
        self.items[key] = self.numbered([*record.inputs, *record.outputs])

    def get(self, kind: Kind, owner: str, id: str, *, events: bool = False) -> Record | None:
        record = self.stored.get((owner, kind, id))
        return record if events or record is None else replace(record, events=b"")

    def chain(self, owner: str, id: str, longest: int, most: ReadLimits) -> ResponseChain:
        chain: list[Record] = []
        wanted: str | None = id
        while wanted is not None:
            record = self.get("response", owner, wanted)
            if record is None:
                raise RecordNotFound(wanted)
            if len(chain) == longest:
                raise ChainTooLong(longest)
            chain.insert(0, record)
            wanted = record.previous
        items = [item for one in chain for item in (*one.inputs, *one.outputs)]
        bounded(items, most)
        return ResponseChain(chain[-1].status, items)

    def delete(self, kind: Kind, owner: str, id: str) -> bool:
        self.items.pop((owner, kind, id), None)
        return self.stored.pop((owner, kind, id), None) is not None

    def inputs(
        self, kind: Kind, owner: str, id: str, *, after: str | None, limit: int, descending: bool
    ) -> Page[StoredItem] | None:
        record = self.get(kind, owner, id)
        return None if record is None else page(record.inputs, after, limit, descending)

    def records(
        self,
        kind: Kind,
        owner: str,
        *,
        after: str | None,
        limit: int,
        descending: bool,
        model: str | None,
        metadata: Mapping[str, str],
    ) -> Page[Record]:
        mine = [one for (whose, what, _), one in self.stored.items() if (whose, what) == (owner, kind)]
        mine.sort(key=lambda one: one.created_at)
        mine = mine[::-1] if descending else mine
        if after is not None:
            indices = [offset for offset, one in enumerate(mine) if one.id == after]
            if not indices:
                raise UnknownCursor(after)
            mine = mine[indices[0] + 1 :]
        fit = [
            replace(one, events=b"", inputs=(), outputs=())
            for one in mine
            if model in (None, one.model) and metadata.items() <= one.metadata.items()
        ]
        return Page(fit[:limit], has_more=len(fit) > limit)

    def set_metadata(self, kind: Kind, owner: str, id: str, metadata: dict[str, str], body: bytes) -> bool:
        key = (owner, kind, id)
        if key in self.stored:
            self.stored[key] = replace(self.stored[key], metadata=metadata, body=body)
        return key in self.stored

    def create_conversation(self, conversation: StoredConversation, first: Sequence[StoredItem]) -> None:
        key = (conversation.owner, conversation.id)
        if key in self.held:
            raise Conflict("")
        self.held[key] = HeldConversation(conversation, self.numbered(first))

    def conversation(self, owner: str, id: str) -> StoredConversation | None:
        held = self.held.get((owner, id))
        return held.conversation if held else None

    def set_conversation_metadata(self, owner: str, id: str, metadata: dict[str, str]) -> bool:
        held = self.held.get((owner, id))
        if held is not None:
            held.conversation = replace(held.conversation, metadata=metadata)
        return held is not None

    def delete_conversation(self, owner: str, id: str) -> bool:
        return self.held.pop((owner, id), None) is not None

    def add_items(
        self, owner: str, id: str, more: Sequence[StoredItem], version: int | None = None
    ) -> StoredConversation | None:
        held = self.held.get((owner, id))
        if held is None:
            return None
        if version not in (None, held.conversation.version):
            raise Conflict("")
        held.items += self.numbered(more)
        held.conversation = replace(held.conversation, version=held.conversation.version + 1)
        return held.conversation

    def conversation_items(
        self, owner: str, id: str, *, after: str | None, limit: int, descending: bool
    ) -> Page[StoredItem] | None:
        held = self.held.get((owner, id))
        return page([item for _, item in held.items], after, limit, descending) if held else None

    def conversation_item(self, owner: str, id: str, item_id: str) -> StoredItem | None:
        held = self.held.get((owner, id))
        fit = [item for _, item in held.items if item.id == item_id] if held else []
        return fit[-1] if fit else None

    def delete_item(self, owner: str, id: str, item_id: str) -> bool:
        if self.conversation_item(owner, id, item_id) is None:
            return False
        held = self.held[owner, id]
        held.items = [entry for entry in held.items if entry[1].id != item_id]
        held.conversation = replace(held.conversation, version=held.conversation.version + 1)
        return True

    def all_items(self, owner: str, id: str, most: ReadLimits) -> list[StoredItem] | None:
        held = self.held.get((owner, id))
        return bounded([item for _, item in held.items], most) if held else None

    def find_items(self, owner: str, wanted: Mapping[str, int], most: ReadLimits) -> dict[str, StoredItem]:
        fields = {id: StoredItem(id, body) for id in wanted if (body := self._body(owner, id)) is not None}
        check_count(sum(len(item.body) * wanted[id] for id, item in fields.items()), most.bytes, "", "")
        return fields

    def _body(self, owner: str, item_id: str) -> bytes | None:
        positions = [entries for (whose, *_), entries in self.items.items() if whose == owner]
        positions += [held.items for (whose, _), held in self.held.items() if whose == owner]
        fit = [entry for entries in positions for entry in entries if entry[1].id == item_id]
        return max(fit, key=lambda entry: entry[0])[1].body if fit else None


def bounded(items: list[StoredItem], most: ReadLimits) -> list[StoredItem]:
    check_count(len(items), most.items, "", "")
    check_count(sum(len(item.body) for item in items), most.bytes, "", "")
    return items


def page(items: Sequence[StoredItem], after: str | None, limit: int, descending: bool) -> Page[StoredItem]:
    ordered = list(items)[::-1] if descending else list(items)
    if after is not None:
        indices = [offset for offset, item in enumerate(ordered) if item.id == after]
        if not indices:
            raise UnknownCursor(after)
        ordered = ordered[indices[-1] + 1 :]
    return Page(ordered[:limit], has_more=len(ordered) > limit)
