"""Whatever is done in whatever order, the stores answer like a model in plain Python."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dragoman.errors import DragomanError
from dragoman.store import ConversationAppend, ReadLimits, Record, StoredConversation, StoredItem, StoreLimits
from dragoman.store.sqlite import SqliteStore
from tests.store.model import Model
from tests.store.samples import MOST

# Few names, so that they meet.
IDS = st.sampled_from("ab")
OWNERS = st.sampled_from(["ann", "ann", "ann", "bob"])
KINDS = st.sampled_from(["response", "response", "chat"])
ITEM_IDS = st.sampled_from("xyz")
BODIES, TRAILS = st.sampled_from([b"1", b"2"]), st.sampled_from([b"", b"\0"])
ITEMS = st.lists(st.builds(StoredItem, ITEM_IDS, BODIES, TRAILS), max_size=4).map(tuple)
METADATA = st.dictionaries(st.sampled_from("kl"), st.sampled_from("12"))
MOSTS = st.builds(ReadLimits, items=st.integers(1, 6), bytes=st.integers(1, 6))
VERSIONS = st.none() | st.integers(0, 3)
RECORDS = st.builds(
    Record,
    kind=KINDS,
    id=IDS,
    owner=OWNERS,
    created_at=st.sampled_from([1.0, 2.0, 3.0]),
    status=st.sampled_from(["completed", "queued"]),
    model=st.sampled_from("mn"),
    metadata=METADATA,
    previous=st.none() | IDS,
    body=st.binary(max_size=9),
    inputs=ITEMS,
    outputs=ITEMS,
    events=st.binary(max_size=9),
)
CONVERSATIONS = st.builds(
    StoredConversation, id=IDS, owner=OWNERS, created_at=st.just(1.0), metadata=METADATA, version=st.just(0)
)


def pages(entries: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"after": st.none() | entries, "limit": st.integers(1, 4), "descending": st.booleans()}
    )


class Stores(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.stores = [SqliteStore(None, StoreLimits()), SqliteStore(Path(self.folder.name), StoreLimits())]
        for store in self.stores:
            self.runner.run(store.open())

    def teardown(self) -> None:
        for store in self.stores:
            self.runner.run(store.close())
        self.runner.close()
        self.folder.cleanup()

    def ask(self, method: str, *args: Any, **words: Any) -> None:
        """The model and the stores answer alike, or refuse alike."""
        expected: Any
        try:
            expected = getattr(self.model, method)(*args, **words)
        except DragomanError as error:
            expected = type(error)
        for store in self.stores:
            try:
                answer = self.runner.run(getattr(store, method)(*args, **words))
            except DragomanError as error:
                answer = type(error)
            assert answer == expected

    @rule(record=RECORDS, append=st.none() | st.builds(ConversationAppend, IDS, VERSIONS, ITEMS))
    def save(self, record: Record, append: ConversationAppend | None) -> None:
        self.ask("save", record, append)

    @rule(kind=KINDS, owner=OWNERS, id=IDS)
    def delete(self, **where: Any) -> None:
        self.ask("delete", **where)

    @rule(kind=KINDS, owner=OWNERS, id=IDS, metadata=METADATA, body=st.binary(max_size=9))
    def set_metadata(self, **fields: Any) -> None:
        self.ask("set_metadata", **fields)

    @rule(conversation=CONVERSATIONS, first=ITEMS)
    def create_conversation(self, **fields: Any) -> None:
        self.ask("create_conversation", **fields)

    @rule(owner=OWNERS, id=IDS, more=ITEMS, version=VERSIONS)
    def add_items(self, **fields: Any) -> None:
        self.ask("add_items", **fields)

    @rule(owner=OWNERS, id=IDS, item_id=ITEM_IDS)
    def delete_item(self, **where: Any) -> None:
        self.ask("delete_item", **where)

    @rule(owner=OWNERS, id=IDS, metadata=METADATA)
    def set_conversation_metadata(self, **fields: Any) -> None:
        self.ask("set_conversation_metadata", **fields)

    @rule(owner=OWNERS, id=IDS)
    def delete_conversation(self, **where: Any) -> None:
        self.ask("delete_conversation", **where)

    @rule(kind=KINDS, owner=OWNERS, id=IDS, page=pages(ITEM_IDS))
    def inputs(self, page: dict[str, Any], **where: Any) -> None:
        self.ask("inputs", **where, **page)

    @rule(owner=OWNERS, id=IDS, page=pages(ITEM_IDS))
    def conversation_items(self, page: dict[str, Any], **where: Any) -> None:
        self.ask("conversation_items", **where, **page)

    @rule(
        kind=KINDS,
        owner=OWNERS,
        model=st.none() | st.sampled_from("mn"),
        metadata=METADATA,
        page=pages(IDS),
    )
    def records(self, page: dict[str, Any], **fields: Any) -> None:
        self.ask("records", **fields, **page)

    @rule(owner=OWNERS, wanted=st.dictionaries(ITEM_IDS, st.integers(1, 4)), most=MOSTS)
    def find_items(self, **fields: Any) -> None:
        self.ask("find_items", **fields)

    @rule(owner=OWNERS, id=IDS, most=MOSTS)
    def all_items(self, **fields: Any) -> None:
        self.ask("all_items", **fields)

    @rule(owner=OWNERS, id=IDS, longest=st.integers(1, 4), most=MOSTS)
    def chain(self, **fields: Any) -> None:
        self.ask("chain", **fields)

    @rule()
    def reopen(self) -> None:
        """A restart changes nothing."""
        self.runner.run(self.stores[1].close())
        self.stores[1] = SqliteStore(Path(self.folder.name), StoreLimits())
        self.runner.run(self.stores[1].open())

    @invariant()
    def all_alike(self) -> None:
        for id in "ab":
            self.ask("get", "response", "ann", id, events=True)
            self.ask("conversation", "ann", id)
        self.ask("find_items", "ann", dict.fromkeys("xyz", 1), MOST)
        for item_id in "xyz":
            self.ask("conversation_item", "ann", "a", item_id)


test_stores = Stores.TestCase
test_stores.settings = settings(max_examples=25, stateful_step_count=25)
