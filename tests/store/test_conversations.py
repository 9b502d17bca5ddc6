"""What every store does with conversations: in memory, in a file, in PostgreSQL."""

import asyncio

import pytest

from dragoman.errors import BadRequest, Conflict, UnknownCursor
from dragoman.store import ConversationAppend, ReadLimits, Store, StoredItem
from dragoman.store.items import PAGE_BYTES, TRAIL_BYTES, find
from tests.store.samples import MOST, conversation, held, ids, item, read_body, record

pytestmark = pytest.mark.anyio


async def test_a_conversation_comes_back_whole(store: Store) -> None:
    stored_conversation = conversation(metadata={"topic": "demo"})
    await store.create_conversation(stored_conversation, [item("a"), item("b")])
    assert await store.conversation("ann", "c") == stored_conversation
    assert await held(store) == ["a", "b"]
    assert await store.conversation_item("ann", "c", "b") == item("b")


async def test_the_same_id_again_is_a_conflict(store: Store) -> None:
    await store.create_conversation(conversation(), [item("a")])
    with pytest.raises(Conflict):
        await store.create_conversation(conversation(), [item("b")])
    assert await held(store) == ["a"]


async def test_what_is_another_owners_is_not_there(store: Store) -> None:
    await store.create_conversation(conversation(), [item("a")])
    assert await store.conversation("bob", "c") is None
    assert await store.conversation_items("bob", "c") is None
    assert await store.conversation_item("bob", "c", "a") is None
    assert await store.add_items("bob", "c", [item("b")]) is None
    assert not await store.delete_item("bob", "c", "a")
    assert not await store.set_conversation_metadata("bob", "c", {"x": "1"})
    assert not await store.delete_conversation("bob", "c")
    with pytest.raises(Conflict):
        await store.save(record("r", owner="bob"), ConversationAppend("c", 0, (item("b"),)))
    assert await store.conversation("ann", "c") == conversation()
    assert await held(store) == ["a"]


async def test_every_change_of_the_items_counts_the_version_up(store: Store) -> None:
    await store.create_conversation(conversation())
    added = await store.add_items("ann", "c", [item("a"), item("b")])
    assert added == conversation(version=1)
    assert await store.delete_item("ann", "c", "a")
    await store.save(record("r"), ConversationAppend("c", 2, (item("d"),)))
    assert await store.conversation("ann", "c") == conversation(version=3)
    assert await held(store) == ["b", "d"]


async def test_what_is_not_deleted_changes_no_version(store: Store) -> None:
    await store.create_conversation(conversation())
    assert not await store.delete_item("ann", "c", "nothing")
    assert await store.conversation("ann", "c") == conversation()


async def test_a_record_and_what_it_adds_are_stored_both_or_neither(store: Store) -> None:
    await store.create_conversation(conversation())
    await store.add_items("ann", "c", [item("first")])
    for append in (
        ConversationAppend("c", 0, (item("late"),)),
        ConversationAppend("gone", 0, (item("late"),)),
    ):
        with pytest.raises(Conflict):
            await store.save(record("r", outputs=(item("out"),)), append)
    assert await store.get("response", "ann", "r") is None
    assert await read_body(store, "ann", "out") is None
    assert await held(store) == ["first"]


async def test_of_many_that_expect_the_same_version_one_wins(store: Store) -> None:
    await store.create_conversation(conversation())

    async def save(n: int) -> bool:
        try:
            await store.save(record(f"r{n}"), ConversationAppend("c", 0, (item(f"i{n}"),)))
        except Conflict:
            return False
        return True

    won = [n for n, success in enumerate(await asyncio.gather(*map(save, range(8)))) if success]
    assert len(won) == 1
    assert await held(store) == [f"i{won[0]}"]
    assert (await store.stats()).counts["response"] == 1


async def test_what_many_add_does_not_mix(store: Store) -> None:
    await store.create_conversation(conversation())
    parts = [[item(f"{n}-{offset}") for offset in range(5)] for n in range(8)]
    await asyncio.gather(*(store.add_items("ann", "c", part) for part in parts))
    names = await held(store)
    blocks = [names[start : start + 5] for start in range(0, 40, 5)]
    assert sorted(blocks) == [ids(part) for part in parts]


async def test_items_may_be_added_to_a_version(store: Store) -> None:
    await store.create_conversation(conversation())
    assert await store.add_items("ann", "c", [item("a")], version=0) == conversation(version=1)
    with pytest.raises(Conflict):
        await store.add_items("ann", "c", [item("b")], version=0)
    assert await store.add_items("ann", "gone", [item("b")], version=0) is None


@pytest.mark.parametrize("descending", [False, True])
async def test_pages_of_items_join_to_all_of_them(store: Store, descending: bool) -> None:
    names = [f"i{n}" for n in range(5)]
    await store.create_conversation(conversation(), [item(name) for name in names])
    await store.create_conversation(conversation("other"), [item("other")])
    first = await store.conversation_items("ann", "c", limit=3, descending=descending)
    assert first is not None
    last = await store.conversation_items("ann", "c", after=first.data[-1].id, limit=3, descending=descending)
    assert last is not None
    assert (first.has_more, last.has_more) == (True, False)
    assert ids(first.data) + ids(last.data) == (names[::-1] if descending else names)


async def test_a_cursor_of_another_conversation_is_unknown(store: Store) -> None:
    await store.create_conversation(conversation())
    await store.create_conversation(conversation("other"), [item("a")])
    with pytest.raises(UnknownCursor):
        await store.conversation_items("ann", "c", after="a")


async def test_metadata_can_be_set(store: Store) -> None:
    await store.create_conversation(conversation(metadata={"old": "1"}))
    assert await store.set_conversation_metadata("ann", "c", {"new": "2"})
    assert await store.conversation("ann", "c") == conversation(metadata={"new": "2"})


async def test_nothing_is_left_of_what_is_deleted(store: Store) -> None:
    await store.create_conversation(conversation(), [item("a")])
    assert await store.delete_conversation("ann", "c")
    assert await store.conversation("ann", "c") is None
    assert await read_body(store, "ann", "a") is None
    stats = await store.stats()
    assert (sum(stats.counts.values()), stats.bytes) == (0, 0)


async def test_the_bytes_of_items_come_and_go_with_them(store: Store) -> None:
    await store.create_conversation(conversation(), [item("a", "x" * 1000)])
    full = (await store.stats()).bytes
    await store.add_items("ann", "c", [item("b")])
    assert (await store.stats()).bytes > full
    await store.delete_item("ann", "c", "b")
    assert (await store.stats()).bytes == full


async def test_an_item_is_found_wherever_it_is(store: Store) -> None:
    await store.save(record("r", inputs=(item("in", "1"),), outputs=(item("out", "2"),)))
    await store.create_conversation(conversation(), [item("held", "3")])
    for id, text in (("in", "1"), ("out", "2"), ("held", "3")):
        assert await read_body(store, "ann", id) == item(id, text).body
    await store.save(record("s", inputs=(item("in", "newer"),)))
    assert await read_body(store, "ann", "in") == item("in", "newer").body


async def test_what_is_too_much_to_read_is_refused_unread(store: Store) -> None:
    await store.create_conversation(conversation(), [item("a", "x" * 90), item("b", "x" * 90)])
    assert ids(await store.all_items("ann", "c", ReadLimits(items=2, bytes=202)) or ()) == ["a", "b"]
    with pytest.raises(BadRequest, match="At most 1 items"):
        await store.all_items("ann", "c", ReadLimits(items=1, bytes=202))
    with pytest.raises(BadRequest, match="At most 201 bytes of stored items are allowed, got 202"):
        await store.all_items("ann", "c", ReadLimits(items=2, bytes=201))


async def test_an_item_counts_as_often_as_it_is_meant(store: Store) -> None:
    long = item("a", "x" * 90)
    await store.create_conversation(conversation(), [long])
    assert await store.find_items("ann", {"a": 9}, ReadLimits(items=9, bytes=909)) == {"a": long}
    with pytest.raises(BadRequest, match="got 1010"):
        await store.find_items("ann", {"a": 10}, ReadLimits(items=10, bytes=909))


async def test_a_page_ends_before_it_is_too_large(store: Store) -> None:
    long = "x" * (PAGE_BYTES // 2)
    await store.create_conversation(conversation(), [item("a", 3 * long), item("b", long), item("c", long)])
    seen: list[list[str]] = []
    more = True
    while more:
        page = await store.conversation_items("ann", "c", after=seen[-1][-1] if seen else None, limit=100)
        assert page is not None
        seen.append(ids(page.data))
        more = page.has_more
    assert seen == [["a"], ["b"], ["c"]]


async def test_of_many_long_trails_the_last_are_read(store: Store) -> None:
    trail = b"x" * (TRAIL_BYTES // 2)
    await store.create_conversation(conversation(), [StoredItem(name, b"{}", trail) for name in "abc"])
    items = await store.all_items("ann", "c", MOST)
    assert [bool(one.trail) for one in items or ()] == [False, True, True]


def test_many_items_are_found_with_few_statements() -> None:
    operation = find("ann", {f"i{number}": 1 for number in range(4096)}, MOST)
    statements = [next(operation)]
    with pytest.raises(StopIteration):
        while True:
            statements.append(operation.send([]))
    assert len(statements) < 10
