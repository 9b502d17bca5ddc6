"""What every store does about its size and age, about servers that are gone, and about everything at once."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import BodyTooLarge
from dragoman.store import Store, StoredItem, StoreLimits
from dragoman.store import store as upkeep
from dragoman.store.records import VERSION
from tests.store.conftest import Make
from tests.store.samples import all_ids, conversation, ids, item, record

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
BULK = 40_000
lasting = pytest.mark.parametrize("make", ["sqlite", "postgres"], indirect=True)
"""Stores that outlive their process."""


async def test_the_oldest_make_room_for_the_new(make: Make) -> None:
    store = make(StoreLimits(max_bytes=MIB))
    await store.open()
    await store.save(record("busy", created_at=-2, status="in_progress"))
    await store.create_conversation(conversation(created_at=-1), [item("old", "x" * BULK)])
    for n in range(60):
        await store.save(record(f"r{n}", created_at=n, body=b" " * BULK, inputs=(item("i", "x" * BULK),)))
        assert (await store.stats()).bytes <= MIB
    first, *kept = await all_ids(store)
    assert first == "busy"
    assert 5 < len(kept) < 20
    assert kept == [f"r{n}" for n in range(60 - len(kept), 60)]
    await store.close()


async def test_a_conversation_is_as_old_as_its_last_change(make: Make) -> None:
    now = 0.0
    store = make(StoreLimits(max_bytes=MIB, max_age=10), lambda: now)
    await store.open()
    await store.create_conversation(conversation(created_at=0))
    await store.save(record("r", created_at=0))
    await store.save(record("busy", created_at=0, status="queued"))
    now = 9
    await store.add_items("ann", "c", [item("a")])
    now = 12
    await store.save(record("new", created_at=now, body=b" " * BULK))
    assert await all_ids(store) == ["busy", "new"]
    assert await store.conversation("ann", "c") is not None
    now = 20
    await store.save(record("newer", created_at=now, body=b" " * BULK))
    assert await store.conversation("ann", "c") is None
    await store.close()


async def test_what_would_push_everything_out_is_refused(make: Make) -> None:
    store = make(StoreLimits(max_bytes=MIB))
    await store.open()
    await store.save(record("r"))
    with pytest.raises(BodyTooLarge, match="store_max_bytes"):
        await store.save(record("huge", body=b" " * MIB))
    assert await all_ids(store) == ["r"]
    await store.close()


async def test_room_is_made_by_those_who_have_more_than_their_share(make: Make) -> None:
    store = make(StoreLimits(max_bytes=MIB))
    await store.open()
    await store.create_conversation(conversation(owner="bob", created_at=-9), [item("i", "x" * BULK)])
    for n in range(4):
        await store.save(record(f"b{n}", owner="bob", created_at=n - 8, body=b" " * BULK))
    for n in range(60):
        await store.save(record(f"a{n}", owner="ann", created_at=n, body=b" " * BULK))
        assert (await store.stats()).bytes <= MIB
    assert await store.conversation("bob", "c") is not None
    assert await all_ids(store, owner="bob") == [f"b{n}" for n in range(4)]
    kept = await all_ids(store)
    assert 10 < len(kept) < 24
    assert kept == [f"a{n}" for n in range(60 - len(kept), 60)]
    await store.close()


async def test_what_is_more_than_a_share_is_refused(make: Make) -> None:
    store = make(StoreLimits(max_bytes=MIB))
    await store.open()
    for owner in ("ann", "bob", "cid"):
        await store.save(record("r", owner=owner))
    await store.create_conversation(conversation(owner="bob"), [item("i", "x" * (MIB // 4))])
    with pytest.raises(BodyTooLarge, match="share of the store"):
        await store.save(record("big", owner="ann", body=b" " * (MIB * 2 // 5)))
    with pytest.raises(BodyTooLarge, match="share of the store"):
        await store.add_items("bob", "c", [item("more", "x" * (MIB // 8))])
    page = await store.conversation_items("bob", "c")
    assert page is not None and ids(page.data) == ["i"]
    await store.close()


@given(st.dictionaries(st.text(max_size=2), st.integers(1, 99), max_size=6), st.integers(1, 99))
def test_who_has_no_more_than_an_equal_share_gives_up_nothing(bytes_of: dict[str, int], wanted: int) -> None:
    fields = upkeep.eviction_amounts(bytes_of, wanted)
    left = {owner: size - fields.get(owner, 0) for owner, size in bytes_of.items()}
    assert all(0 < size <= bytes_of[owner] for owner, size in fields.items())
    assert sum(bytes_of.values()) - wanted <= sum(left.values()) or not any(left.values())
    assert sum(fields.values()) >= min(wanted, sum(bytes_of.values())) - len(bytes_of)
    if fields:
        level = min(left[owner] for owner in fields)
        assert all(size <= level for size in left.values())


async def test_work_of_this_server_is_no_orphan(store: Store) -> None:
    await store.save(record("r", status="in_progress"))
    assert await store.adopt_orphans() == []


@lasting
async def test_what_was_stored_is_there_the_next_time(make: Make) -> None:
    first, second = make(), make()
    await first.open()
    await first.save(record("r"))
    await first.close()
    await second.open()
    assert await second.get("response", "ann", "r") == record("r")
    await second.close()


@lasting
async def test_work_of_a_server_that_lives_is_no_orphan(make: Make) -> None:
    first, second = make(), make()
    await first.open()
    await second.open()
    await first.save(record("r", status="in_progress"))
    assert await second.adopt_orphans() == []
    await first.close()
    await second.close()


@lasting
async def test_work_of_a_server_that_is_gone_is_taken_over_once(make: Make) -> None:
    gone, second, third = make(), make(), make()
    await gone.open()
    left = [
        record("q", status="queued", outputs=(item("o"),)),
        record("p", status="in_progress", owner="bob"),
    ]
    for one in [*left, record("done")]:
        await gone.save(one)
    await gone.close()
    await second.open()
    await third.open()
    assert await second.adopt_orphans() == left
    assert await third.adopt_orphans() == []
    await second.close()
    assert await third.adopt_orphans() == left
    await third.close()


async def test_the_ids_of_items_count(store: Store) -> None:
    sizes = []
    for trail in (b"", b"x" * 1000):
        await store.save(record("r", outputs=(StoredItem("a", b"{}", trail),)))
        await store.create_conversation(conversation(), [StoredItem("b", b"{}", trail)])
        sizes.append((await store.stats()).bytes)
        await store.delete_item("ann", "c", "b")
        await store.delete_conversation("ann", "c")
        await store.delete("response", "ann", "r")
        assert (await store.stats()).bytes == 0
    assert sizes[1] - sizes[0] == 2000


async def test_stats_count_everything(store: Store) -> None:
    assert (await store.stats()).oldest is None
    await store.save(record("r", created_at=7, inputs=(item("a"),)))
    await store.save(record("s", kind="chat", created_at=5))
    await store.create_conversation(conversation(created_at=6), [item("b")])
    stats = await store.stats()
    assert stats.counts == {"response": 1, "chat": 1, "conversation": 1, "item": 2}
    assert (stats.oldest, stats.schema_version, stats.bounds) == (5, VERSION, StoreLimits())
    assert 0 < stats.bytes < stats.file_bytes


async def test_everything_of_everybody_is_exported(store: Store) -> None:
    for n in range(120):
        await store.save(record(f"r{n}", owner=f"o{n % 2}", inputs=(item("a"),), events=b"\0log"))
    await store.create_conversation(conversation(), [item("b"), StoredItem("c", b"{}", b"ids")])
    lines = [json.loads(line) async for line in store.export()]
    assert [line["id"] for line in lines] == [*(f"r{n}" for n in range(120)), "c"]
    assert base64.b64decode(lines[0]["events"]) == b"\0log"
    assert lines[0]["body"] == {"id": "r0"}
    assert lines[0]["inputs"] == [{"id": "a", "body": {"text": ""}}]
    assert [line["type"] for line in lines[-2:]] == ["record", "conversation"]
    assert [one["id"] for one in lines[-1]["items"]] == ["b", "c"]
    assert base64.b64decode(lines[-1]["items"][1]["trail"]) == b"ids"


async def test_a_vacuum_loses_nothing(store: Store) -> None:
    for n in range(20):
        await store.save(record(f"r{n}", body=b" " * BULK))
    for n in range(19):
        await store.delete("response", "ann", f"r{n}")
    before = (await store.stats()).file_bytes
    await store.vacuum()
    await store.check()
    assert (await store.stats()).file_bytes <= before
    assert ids((await store.records("response", "ann")).data) == ["r19"]
