"""Pictures and sounds of stored items: once for each owner, given back as they came, gone with the last."""

import json
from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dragoman.errors import BadRequest, BodyTooLarge
from dragoman.store import ConversationAppend, ReadLimits, Store, StoredItem, StoreLimits
from dragoman.store.media import extract_media, put_item_back
from tests.store.conftest import Make
from tests.store.samples import MOST, all_ids, conversation, record

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024


def picture(size: int, fill: int = 1) -> bytes:
    return b"\x89PNG\r\n" + bytes([fill]) * size


RED, BLUE = picture(50_000), picture(50_000, 2)


def shows(id: str, *pictures: bytes, text: str = "") -> StoredItem:
    urls = [f"data:image/png;base64,{b64encode(each).decode()}" for each in pictures]
    return StoredItem(id, json.dumps({"id": id, "text": text, "urls": urls}).encode())


async def bytes_of(store: Store) -> int:
    return (await store.stats()).bytes


def body_of(item: StoredItem | None) -> bytes:
    assert item is not None
    return item.body


async def test_items_come_back_as_they_were(store: Store) -> None:
    asked, answered, more = shows("a", RED, BLUE, RED), shows("b", text="x" * 9999), shows("c", RED)
    await store.create_conversation(conversation(), [more])
    append = ConversationAppend("c", None, (asked,))
    await store.save(record("r", inputs=(asked,), outputs=(answered,)), append)
    value = await store.get("response", "ann", "r")
    assert value is not None
    assert [each.body for each in (*value.inputs, *value.outputs)] == [asked.body, answered.body]
    inputs = await store.inputs("response", "ann", "r")
    assert inputs is not None
    assert [each.body for each in inputs.data] == [asked.body]
    chain = await store.chain("ann", "r", 9, MOST)
    assert [each.body for each in chain.items] == [asked.body, answered.body]
    held = await store.conversation_items("ann", "c")
    assert held is not None
    assert [each.body for each in held.data] == [more.body, asked.body]
    assert body_of(await store.conversation_item("ann", "c", "a")) == asked.body
    assert (await store.find_items("ann", {"a": 1}, MOST))["a"].body == asked.body
    lines = [json.loads(line) async for line in store.export()]
    assert lines[0]["inputs"][0]["body"] == json.loads(asked.body)
    assert lines[1]["items"][0]["body"] == json.loads(more.body)


async def test_what_several_items_show_is_kept_once_and_goes_with_the_last(store: Store) -> None:
    await store.create_conversation(conversation(), [shows("a", RED)])
    once = await bytes_of(store)
    assert once > len(RED)
    await store.save(record("r", inputs=(shows("b", RED),)))
    await store.save(record("r", inputs=(shows("b", RED), shows("d", RED))))
    await store.add_items("ann", "c", [shows("e", RED)])
    assert await bytes_of(store) < once + 5000
    await store.save(record("of bob", owner="bob", inputs=(shows("b", RED),)))
    assert await bytes_of(store) > once + len(RED)
    assert await store.delete("response", "bob", "of bob")
    assert await store.delete_item("ann", "c", "a")
    assert await store.delete_conversation("ann", "c")
    assert (await store.find_items("ann", {"d": 1}, MOST))["d"].body == shows("d", RED).body
    assert await store.delete("response", "ann", "r")
    assert await bytes_of(store) == 0


async def test_what_is_shown_has_a_limit_of_its_own(store: Store) -> None:
    await store.create_conversation(conversation(), [shows("a", RED), shows("b", BLUE)])
    most = ReadLimits(items=9, bytes=1000, shown=140_000)
    assert len(await store.all_items("ann", "c", most) or ()) == 2
    with pytest.raises(BadRequest, match="stored media"):
        await store.all_items("ann", "c", replace(most, shown=100_000))
    with pytest.raises(BadRequest, match="stored media"):
        await store.find_items("ann", {"a": 3}, most)


async def test_a_page_counts_what_it_shows(store: Store) -> None:
    large = [picture(2 * MIB, n) for n in range(3)]
    await store.create_conversation(conversation(), [shows(str(n), each) for n, each in enumerate(large)])
    page = await store.conversation_items("ann", "c")
    assert page is not None
    assert (len(page.data), page.has_more) == (1, True)


async def test_pictures_count_in_a_share(make: Make) -> None:
    store = make(StoreLimits(max_bytes=MIB))
    await store.open()
    with pytest.raises(BodyTooLarge):
        await store.save(record("r", inputs=(shows("a", picture(MIB)),)))
    await store.create_conversation(conversation(), [shows("a", picture(200_000))])
    with pytest.raises(BodyTooLarge):
        for n in range(2, 9):
            await store.add_items("ann", "c", [shows("b", picture(200_000, n))])
    await store.close()


async def test_the_oldest_pictures_make_room(make: Make) -> None:
    store = make(StoreLimits(max_bytes=MIB))
    await store.open()
    for n in range(30):
        result = record(f"r{n}", created_at=n, inputs=(shows("a", picture(100_000, n)),))
        await store.save(result)
    kept = await all_ids(store)
    assert 3 < len(kept) < 11
    assert kept == [f"r{n}" for n in range(30 - len(kept), 30)]
    await store.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6000)), max_size=4))
async def test_any_text_comes_back(parts: list[tuple[bool, int]]) -> None:
    texts = [
        b64encode(picture(size)).decode() if real else "iVBORw" + "A" * size + "=" * (size % 4)
        for real, size in parts
    ]
    item = StoredItem("a", json.dumps(texts).encode())
    [stored] = await extract_media([item])
    assert put_item_back(stored).body == item.body
