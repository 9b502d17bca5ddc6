"""What is SQLite's own: the file, its threads, and what can go wrong with a disk."""

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dragoman.errors import Conflict, StoreUnavailable
from dragoman.store import ConversationAppend, StoredItem, StoreLimits
from dragoman.store import sqlite as worker
from dragoman.store.disk import BYTES
from dragoman.store.records import FIRST, SQLITE, VERSION, Row, Statement
from dragoman.store.sqlite import FILE, RESERVE, SqliteStore
from tests.store.samples import all_ids, conversation, held, item, read_body, record

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    sqlite_store = SqliteStore(tmp_path, StoreLimits(), busy_s=0.05)
    await sqlite_store.open()
    yield sqlite_store
    await sqlite_store.close()


async def in_writer(store: SqliteStore, sql: str) -> None:
    work = store._writer.submit(lambda connection: connection.execute(sql).fetchall(), alone=True)
    await asyncio.wrap_future(work)


async def busy(store: SqliteStore) -> threading.Event:
    """Has the writer wait for the event."""
    began, gate = threading.Event(), threading.Event()

    def wait(_: sqlite3.Connection) -> None:
        began.set()
        gate.wait()

    store._writer.submit(wait, alone=True)
    await asyncio.to_thread(began.wait)
    return gate


async def refused(folder: Path) -> str:
    store = SqliteStore(folder, StoreLimits())
    with pytest.raises(StoreUnavailable) as caught:
        await store.open()
    assert caught.value.status == 503
    return caught.value.message


async def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "new" / "folder", StoreLimits())
    await store.open()
    await store.save(record("r"))
    files = list((tmp_path / "new" / "folder").iterdir())
    assert {file.name for file in files} >= {FILE, f"{FILE}-wal"}
    assert {oct(file.stat().st_mode & 0o777) for file in files} == {"0o600"}
    await store.close()


async def test_nothing_but_the_database_and_its_reserve_stays_behind(
    store: SqliteStore, tmp_path: Path
) -> None:
    await store.save(record("r"))
    await store.close()
    assert {file.name for file in tmp_path.iterdir()} == {FILE, RESERVE}


async def test_a_second_store_of_the_process_leaves_the_locks_of_the_first(
    store: SqliteStore, tmp_path: Path
) -> None:
    """Without its lock the first would not be seen by others, who would clear its log away under it."""
    other = SqliteStore(tmp_path, StoreLimits())
    await other.open()
    visit = f"import sqlite3; sqlite3.connect({str(tmp_path / FILE)!r}).execute('SELECT 1 FROM records')"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", visit], check=True)
    assert (tmp_path / f"{FILE}-wal").exists()
    await other.close()


async def test_what_waits_together_is_committed_together(store: SqliteStore) -> None:
    texts: list[str] = []
    trace = store._writer.submit(lambda connection: connection.set_trace_callback(texts.append), alone=True)
    await asyncio.wrap_future(trace)
    gate = await busy(store)
    saves = asyncio.gather(*(store.save(record(f"r{n}")) for n in range(100)))
    await asyncio.sleep(0)
    gate.set()
    await saves
    assert texts.count("COMMIT") == 1
    assert len(await all_ids(store)) == 100


async def test_one_that_fails_harms_none_beside_it(store: SqliteStore) -> None:
    await store.create_conversation(conversation())
    lone_surrogate = record("bad", model="\ud800")
    outcomes = await asyncio.gather(
        store.save(record("a")),
        store.save(record("late"), ConversationAppend("c", 9, ())),
        store.save(lone_surrogate),
        store.save(record("b")),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), Conflict, UnicodeEncodeError, type(None)]
    assert await all_ids(store) == ["a", "b"]


@pytest.mark.parametrize("append", [None, ConversationAppend("c", 0, (item("more"),))])
async def test_whatever_statement_fails_nothing_is_half_done(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, append: ConversationAppend | None
) -> None:
    """The k-th statement of a save fails, for every k until none is left to fail."""
    await store.create_conversation(conversation())
    whole = record("r", inputs=(item("in"),), outputs=(item("out"),), metadata={"x": "1"})
    execute, left = worker._execute, 0

    def failing(connection: sqlite3.Connection, statement: Statement) -> list[Row]:
        nonlocal left
        left -= 1
        if left == 0:
            raise sqlite3.OperationalError("disk I/O error")
        return execute(connection, statement)

    failures = 0
    for k in range(1, 50):
        with monkeypatch.context() as patched:
            patched.setattr(worker, "_execute", failing)
            left = k
            try:
                await store.save(whole, append)
                break
            except StoreUnavailable:
                failures += 1
        assert await store.get("response", "ann", "r") is None
        assert await read_body(store, "ann", "in") is None
        assert await held(store) == []
    assert failures >= 6
    assert await store.get("response", "ann", "r") == whole


async def test_a_full_disk_is_said_and_survived(store: SqliteStore) -> None:
    await store.save(record("r"))
    await in_writer(store, "PRAGMA max_page_count = 1")
    with pytest.raises(StoreUnavailable, match="no room"):
        await store.save(record("huge", body=b"x" * MIB))
    assert await all_ids(store) == ["r"]
    await in_writer(store, "PRAGMA max_page_count = 1000000")
    await store.save(record("huge", body=b"x" * MIB))


async def test_on_a_full_disk_what_makes_room_is_done_in_what_was_kept_back(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await store.create_conversation(conversation(), [item("a")])
    for id_ in "rs":
        await store.save(record(id_))
    execute, reserve = worker._execute, tmp_path / RESERVE

    def full(connection: sqlite3.Connection, statement: Statement) -> list[Row]:
        if reserve.exists() and not statement.sql.startswith("SELECT"):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorname = "SQLITE_FULL"
            raise error
        return execute(connection, statement)

    monkeypatch.setattr(worker, "_execute", full)
    outcomes = await asyncio.gather(
        store.save(record("t")),
        store.delete("response", "ann", "r"),
        store.delete("response", "ann", "none"),
        store.delete_item("ann", "c", "a"),
        return_exceptions=True,
    )
    assert [outcome for outcome in outcomes if isinstance(outcome, bool)] == [True, False, True]
    assert isinstance(outcomes[0], StoreUnavailable) and "no room" in outcomes[0].message
    assert reserve.stat().st_size == BYTES
    assert await all_ids(store) == ["s"]


async def test_where_the_database_is_is_not_for_clients(store: SqliteStore, tmp_path: Path) -> None:
    await in_writer(store, "PRAGMA query_only = ON")
    with pytest.raises(StoreUnavailable) as exception_info:
        await store.save(record("s"))
    assert str(tmp_path) not in exception_info.value.message


async def test_a_database_that_cannot_be_written_is_said_and_read(store: SqliteStore) -> None:
    await store.save(record("r"))
    await in_writer(store, "PRAGMA query_only = ON")
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        await store.save(record("s"))
    assert await all_ids(store) == ["r"]


async def test_a_lock_that_is_held_is_said_and_waited_for(store: SqliteStore, tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        await store.save(record("r"))
    assert await all_ids(store) == []
    other.execute("COMMIT")
    other.close()
    await store.save(record("r"))


async def test_a_file_of_an_older_version_is_brought_up_to_date(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / FILE)
    for sql in FIRST:
        old.execute(sql.format_map(SQLITE))
    old.execute("PRAGMA user_version = 1")
    old.execute("INSERT INTO conversations VALUES (1, 'ann', 'c', 1, 1, 0, 99, '{}')")
    old.execute("INSERT INTO items VALUES (1, 'ann', 'a', NULL, 1, 'item', '{}')")
    old.commit()
    old.close()
    store = SqliteStore(tmp_path, StoreLimits())
    await store.open()
    await store.add_items("ann", "c", [StoredItem("b", b"{}", b"ids")])
    page = await store.conversation_items("ann", "c")
    assert page is not None and [(item.id, item.trail) for item in page.data] == [("a", b""), ("b", b"ids")]
    await store.close()


async def test_a_file_of_a_newer_version_is_refused(store: SqliteStore, tmp_path: Path) -> None:
    await in_writer(store, f"PRAGMA user_version = {VERSION + 1}")
    assert "newer dragoman" in await refused(tmp_path)


@pytest.mark.parametrize("content", [b"These are no pages.\n" * 400, b"SQLite format 3\0" + b"\xff" * 5000])
async def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert "not a database of dragoman" in await refused(tmp_path)
    assert (tmp_path / FILE).read_bytes() == content


async def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / FILE)
    other.execute("CREATE TABLE records (theirs)")
    other.close()
    assert "not a database of dragoman" in await refused(tmp_path)


async def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "data_dir" in await refused(tmp_path / "file")


async def test_the_file_stays_within_its_bound(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, StoreLimits(max_bytes=2 * MIB))
    await store.open()
    for round in range(20):
        sizes = range(1, 40_000, 1000)
        saves = [record(f"{round}-{n}", created_at=round, body=b"x" * n, events=bytes(n)) for n in sizes]
        await asyncio.gather(*map(store.save, saves))
    await store.close()
    # Within one transaction it may be above.
    assert (tmp_path / FILE).stat().st_size < 3.5 * MIB


async def test_the_event_loop_does_not_wait_for_the_disk(store: SqliteStore) -> None:
    gate = await busy(store)
    waiting = asyncio.create_task(store.save(record("r")))
    assert await all_ids(store) == []
    gate.set()
    await waiting
    assert await all_ids(store) == ["r"]


async def test_a_save_that_is_given_up_while_it_waits_is_not_done(store: SqliteStore) -> None:
    gate = await busy(store)
    waiting = asyncio.create_task(store.save(record("r")))
    await all_ids(store)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    await store.save(record("s"))
    assert await all_ids(store) == ["s"]


async def test_what_is_queued_is_done_before_the_end(store: SqliteStore, tmp_path: Path) -> None:
    saves = [asyncio.create_task(store.save(record(f"r{n}"))) for n in range(1000)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*saves)
    again = SqliteStore(tmp_path, StoreLimits())
    await again.open()
    assert len(await all_ids(again)) == 1000
    await again.close()
