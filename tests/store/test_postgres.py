"""What is PostgreSQL's own: several servers at once, leases, and a database that goes away."""

import asyncio
import builtins
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from dragoman.errors import SettingsError, StoreUnavailable
from dragoman.store import StoreLimits, open_store
from dragoman.store.postgres import PostgresStore
from dragoman.store.records import VERSION
from tests.store.samples import all_ids, conversation, held, item, record

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    postgres_store = PostgresStore(postgres_url, StoreLimits())
    await postgres_store.open()
    yield postgres_store
    await postgres_store.close()


async def test_servers_that_start_together_make_the_tables_once(postgres_url: str) -> None:
    stores = [PostgresStore(postgres_url, StoreLimits()) for _ in range(4)]
    await asyncio.gather(*(one.open() for one in stores))
    await stores[0].save(record("r"))
    assert await all_ids(stores[3]) == ["r"]
    await asyncio.gather(*(one.close() for one in stores))


async def test_many_servers_that_write_and_sweep_do_not_block_each_other(postgres_url: str) -> None:
    bounds = StoreLimits(max_bytes=1024 * 1024, max_age=1000)
    stores = [PostgresStore(postgres_url, bounds, clock=lambda: 500.0) for _ in range(3)]
    await asyncio.gather(*(one.open() for one in stores))
    await stores[0].create_conversation(conversation())
    for n in range(15):
        saves = [one.save(record(f"r{n}", created_at=n, body=b"x" * 50_000)) for one in stores]
        await asyncio.gather(*saves, *(one.add_items("ann", "c", [item(f"i{n}")]) for one in stores))
    assert (await stores[0].stats()).bytes <= 1024 * 1024
    assert len(await held(stores[0])) == 45
    await asyncio.gather(*(one.close() for one in stores))


async def test_the_work_of_a_server_whose_lease_has_run_out_is_an_orphan(postgres_url: str) -> None:
    dead, living = (
        PostgresStore(postgres_url, StoreLimits(), lease_s=0.2),
        PostgresStore(postgres_url, StoreLimits()),
    )
    await dead.open()
    await living.open()
    await dead.save(record("r", status="in_progress"))
    assert dead._upkeep is not None
    dead._upkeep.cancel()
    async with asyncio.timeout(30):
        while not (orphans := await living.adopt_orphans()):
            await asyncio.sleep(0.02)
    assert orphans == [record("r", status="in_progress")]
    await dead.close()
    await living.close()


async def test_a_lease_is_renewed(postgres_url: str) -> None:
    server, other = (
        PostgresStore(postgres_url, StoreLimits(), lease_s=0.5),
        PostgresStore(postgres_url, StoreLimits()),
    )
    await server.open()
    await other.open()
    select = b"SELECT expires_at FROM dragoman.servers WHERE instance = %s"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        first = connection.execute(select, (server.instance,)).fetchone()
        async with asyncio.timeout(30):
            while connection.execute(select, (server.instance,)).fetchone() == first:
                await asyncio.sleep(0.02)
    await server.close()
    await other.close()


async def test_a_connection_that_was_cut_is_made_again(store: PostgresStore, postgres_url: str) -> None:
    await store.save(record("r"))
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        )
    await store.save(record("s"))
    assert await all_ids(store) == ["r", "s"]


async def test_tables_of_a_newer_version_are_refused(store: PostgresStore, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("UPDATE dragoman.schema_version SET version = %s", (VERSION + 1,))
    with pytest.raises(StoreUnavailable, match="newer dragoman"):
        await PostgresStore(postgres_url, StoreLimits()).open()


@pytest.mark.parametrize("url", ["postgresql://u:secret@127.0.0.1:1/x", "postgresql://u:secret@[nonsense"])
async def test_an_address_where_nothing_is_is_said_without_the_password(url: str) -> None:
    store = PostgresStore(url, StoreLimits())
    with pytest.raises(StoreUnavailable, match="URL in `store`") as caught:
        await store.open()
    assert "secret" not in caught.value.message


async def test_a_database_that_cannot_be_written_is_said(store: PostgresStore, postgres_url: str) -> None:
    read_only = PostgresStore(f"{postgres_url}&options=-cdefault_transaction_read_only%3Don", StoreLimits())
    with pytest.raises(StoreUnavailable, match="read-only"):
        await read_only.open()


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "dragoman.store.postgres":
            raise ImportError
        return really(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SettingsError, match=r"dragoman\[postgres\]"):
        open_store("postgresql://x")
