"""A server that is killed loses nothing that it has acknowledged, and leaves nothing half done."""

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

from dragoman.store import StoreLimits
from dragoman.store.sqlite import FILE, SqliteStore
from tests.store.samples import all_ids, held, ids

ROOT = Path(__file__).parent.parent.parent
KILLS = 3


def acknowledged(folder: Path, run: int, least: int) -> list[str]:
    """What a process says that it has saved until it is killed, somewhere after its `least`-th word."""
    command = [sys.executable, "-m", "tests.store.writer", str(folder), str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writer:
        assert writer.stdout is not None
        texts = [writer.stdout.readline() for _ in range(least)]
        writer.kill()
        texts += writer.stdout.readlines()
    # The last line may be cut short.
    return [line.strip() for line in texts if line.endswith("\n")]


async def read_stored(folder: Path) -> tuple[set[str], set[str]]:
    """The records that are whole, and what the conversations hold."""
    store = SqliteStore(folder, StoreLimits())
    await store.open()
    records = [one for id in await all_ids(store) if (one := await store.get("response", "ann", id))]
    assert all(ids(one.inputs) == [one.id] and len(one.body) == 3000 for one in records)
    names = {one.id.rpartition("-")[0] for one in records}
    items = [id for name in names for id in await held(store, name)]
    assert len(items) == len(set(items))
    await store.close()
    return {one.id for one in records}, set(items)


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    texts: list[str] = []
    for run in range(KILLS):
        texts += acknowledged(tmp_path, run, least=40 + 30 * run)
        with sqlite3.connect(tmp_path / FILE) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        connection.close()
    records, items = asyncio.run(read_stored(tmp_path))
    assert set(texts) <= records
    assert items == records
