"""What every store does with records: in memory, in a file, in PostgreSQL."""

import pytest

from dragoman.errors import BadRequest, ChainTooLong, RecordNotFound, StoreUnavailable, UnknownCursor
from dragoman.store import Store
from dragoman.store.records import LONGEST_ID
from tests.store.samples import MOST, all_ids, ids, item, read_body, record

pytestmark = pytest.mark.anyio

WHOLE = record(
    "r",
    created_at=1234.56789,
    status="incomplete",
    model="a model",
    metadata={"topic": "demo", "empty": ""},
    previous="q",
    inputs=(item("in1"), item("in2")),
    outputs=(item("out1"),),
    events=b"\x00\xff events" * 9,
)
STRANGE = [
    "\0",
    "\\0",
    "\\",
    "a\0b\\0\\\\",
    "'; DROP TABLE records; --",
    "%s ? :x",
    "ß𝕏\u202e\U0010ffff",
    " ",
    "",
]


async def test_a_record_comes_back_whole(store: Store) -> None:
    await store.save(WHOLE)
    assert await store.get("response", "ann", "r", events=True) == WHOLE


async def test_events_come_only_where_they_are_asked_for(store: Store) -> None:
    await store.save(WHOLE)
    value = await store.get("response", "ann", "r")
    assert value is not None
    assert value.events == b""


async def test_many_events_are_kept(store: Store) -> None:
    events = bytes(range(256)) * 4096
    await store.save(record("r", events=events))
    value = await store.get("response", "ann", "r", events=True)
    assert value is not None
    assert value.events == events


async def test_saving_again_replaces_all_of_it(store: Store) -> None:
    await store.save(WHOLE)
    again = record("r", inputs=(item("other"),))
    await store.save(again)
    assert await store.get("response", "ann", "r", events=True) == again
    assert await read_body(store, "ann", "in1") is None
    assert not (await store.records("response", "ann", metadata={"topic": "demo"})).data


async def test_what_is_another_owners_is_not_there(store: Store) -> None:
    await store.save(WHOLE)
    assert await store.get("response", "bob", "r") is None
    assert await store.inputs("response", "bob", "r") is None
    assert await read_body(store, "bob", "in1") is None
    assert not (await store.records("response", "bob")).data
    assert not await store.delete("response", "bob", "r")
    assert not await store.set_metadata("response", "bob", "r", {}, b"{}")
    with pytest.raises(RecordNotFound):
        await store.chain("bob", "r", 9, MOST)
    assert await store.get("response", "ann", "r", events=True) == WHOLE


async def test_two_owners_may_have_the_same_id(store: Store) -> None:
    await store.save(record("r", body=b"1"))
    await store.save(record("r", body=b"2", owner="bob"))
    value = await store.get("response", "ann", "r")
    assert value is not None
    assert value.body == b"1"


async def test_a_response_is_no_chat(store: Store) -> None:
    await store.save(record("r"))
    assert await store.get("chat", "ann", "r") is None
    assert not await store.delete("chat", "ann", "r")


async def test_nothing_is_left_of_what_is_deleted(store: Store) -> None:
    await store.save(WHOLE)
    assert await store.delete("response", "ann", "r")
    assert await store.get("response", "ann", "r") is None
    assert await read_body(store, "ann", "out1") is None
    stats = await store.stats()
    assert (sum(stats.counts.values()), stats.bytes) == (0, 0)
    assert not await store.delete("response", "ann", "r")


async def test_a_chain_begins_with_the_oldest(store: Store) -> None:
    for id, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", "a")):
        await store.save(record(id, previous=previous, inputs=(item(f"{id}-in"),), events=b"x"))
    chain = await store.chain("ann", "c", 3, MOST)
    assert ids(chain.items) == ["a-in", "b-in", "c-in"]
    assert chain.status == "completed"


async def test_a_chain_names_what_is_missing(store: Store) -> None:
    await store.save(record("b", previous="a"))
    await store.save(record("c", previous="b"))
    with pytest.raises(RecordNotFound) as caught:
        await store.chain("ann", "c", 9, MOST)
    assert caught.value.id == "a"
    with pytest.raises(RecordNotFound, match="nothing"):
        await store.chain("ann", "nothing", 9, MOST)


async def test_a_chain_that_is_too_long_is_refused(store: Store) -> None:
    for id, previous in (("a", None), ("b", "a"), ("c", "b")):
        await store.save(record(id, previous=previous))
    with pytest.raises(ChainTooLong, match="2"):
        await store.chain("ann", "c", 2, MOST)


async def test_a_chain_that_bites_its_tail_ends(store: Store) -> None:
    await store.save(record("a", previous="a"))
    with pytest.raises(ChainTooLong):
        await store.chain("ann", "a", 100, MOST)


@pytest.mark.parametrize("descending", [False, True])
async def test_pages_of_inputs_join_to_all_of_them(store: Store, descending: bool) -> None:
    names = [f"i{n}" for n in range(7)]
    await store.save(record("r", inputs=tuple(map(item, names)), outputs=(item("out"),)))
    seen: list[str] = []
    more, after = True, None
    while more:
        page = await store.inputs("response", "ann", "r", after=after, limit=3, descending=descending)
        assert page is not None
        seen += ids(page.data)
        more, after = page.has_more, page.data[-1].id
    assert seen == (names[::-1] if descending else names)


async def test_a_cursor_that_is_not_in_the_list_is_refused(store: Store) -> None:
    await store.save(WHOLE)
    with pytest.raises(UnknownCursor):
        await store.inputs("response", "ann", "r", after="out1")
    with pytest.raises(UnknownCursor):
        await store.records("response", "ann", after="nothing")


async def test_paging_over_one_id_twice_ends(store: Store) -> None:
    await store.save(record("r", inputs=(item("x"), item("a"), item("x"), item("b"))))
    page = await store.inputs("response", "ann", "r", after="x", limit=1)
    assert page is not None
    assert (ids(page.data), page.has_more) == (["b"], False)


async def test_records_are_listed_in_the_order_of_creation(store: Store) -> None:
    for id, created_at in (("c", 3.0), ("a", 1.0), ("b1", 2.0), ("b2", 2.0)):
        await store.save(record(id, kind="chat", created_at=created_at))
    assert await all_ids(store, "chat") == ["a", "b1", "b2", "c"]
    page = await store.records("chat", "ann", after="b2", limit=1, descending=True)
    assert (ids(page.data), page.has_more) == (["b1"], True)
    page = await store.records("chat", "ann", after="b1", limit=2)
    assert (ids(page.data), page.has_more) == (["b2", "c"], False)


async def test_records_are_found_by_model_and_by_every_pair(store: Store) -> None:
    await store.save(record("a", model="one", metadata={"x": "1", "y": "2"}))
    await store.save(record("b", model="two", metadata={"x": "1"}))
    assert ids((await store.records("response", "ann", model="two")).data) == ["b"]
    assert ids((await store.records("response", "ann", metadata={"x": "1"})).data) == ["a", "b"]
    assert ids((await store.records("response", "ann", metadata={"x": "1", "y": "2"})).data) == ["a"]
    assert not (await store.records("response", "ann", metadata={"x": "2"})).data


async def test_metadata_is_set_with_the_body(store: Store) -> None:
    await store.save(WHOLE)
    before = (await store.stats()).bytes
    assert await store.set_metadata("response", "ann", "r", {"new": "1"}, WHOLE.body + b" ")
    value = await store.get("response", "ann", "r")
    assert value is not None
    assert (value.metadata, value.body, value.inputs) == ({"new": "1"}, WHOLE.body + b" ", WHOLE.inputs)
    assert ids((await store.records("response", "ann", metadata={"new": "1"})).data) == ["r"]
    assert not (await store.records("response", "ann", metadata={"topic": "demo"})).data
    assert (await store.stats()).bytes != before


@pytest.mark.parametrize("text", STRANGE)
async def test_any_text_is_a_name(store: Store, text: str) -> None:
    named = record("r", model=text, metadata={text: text}, inputs=(item(text), item("next")), previous=text)
    await store.save(named)
    assert await store.get("response", "ann", "r") == named
    assert ids((await store.records("response", "ann", model=text, metadata={text: text})).data) == ["r"]
    page = await store.inputs("response", "ann", "r", after=text)
    assert page is not None
    assert ids(page.data) == ["next"]
    assert await store.get("response", text, text) is None


async def test_an_id_beyond_measure_is_refused_and_not_looked_up(store: Store) -> None:
    with pytest.raises(BadRequest, match=str(LONGEST_ID)):
        await store.save(record("r", inputs=(item("x" * (LONGEST_ID + 1)),)))
    assert await store.get("response", "ann", "r") is None
    await store.save(record("r", inputs=(item("𝕏" * LONGEST_ID),)))
    assert await read_body(store, "ann", "𝕏" * LONGEST_ID) is not None
    assert await read_body(store, "ann", "x" * 100_000) is None


async def test_a_closed_store_says_so(store: Store) -> None:
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.save(record("r"))
    with pytest.raises(StoreUnavailable):
        await store.check()
