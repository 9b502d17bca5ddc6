"""The key that seals what clients keep for us: made once, whole or not at all."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dragoman.errors import SettingsError
from dragoman.responses.seal import BYTES, FILE, seal_key
from dragoman.settings import Settings
from dragoman.store import make_store
from tests.store.samples import record


def settings(folder: Path) -> Settings:
    return Settings(data_dir=str(folder))


async def used(folder: Path, *ids: str) -> None:
    store = make_store(settings(folder))
    assert store is not None
    await store.open()
    for id_ in ids:
        await store.save(record(id_))
    await store.close()


def test_servers_that_start_together_have_one_key(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with ThreadPoolExecutor(8) as threads:
        keys = set(threads.map(lambda _: seal_key(settings(folder)), range(16)))
    assert [len(key) for key in keys] == [BYTES]
    assert [file.name for file in folder.iterdir()] == [FILE]
    assert (folder / FILE).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("stored", [None, ()])
def test_what_a_start_that_was_cut_off_has_left_is_replaced(
    tmp_path: Path, stored: tuple[str, ...] | None
) -> None:
    if stored is not None:
        asyncio.run(used(tmp_path, *stored))
    (tmp_path / FILE).write_bytes(b"")
    data = seal_key(settings(tmp_path))
    assert len(data) == BYTES
    assert seal_key(settings(tmp_path)) == data


@pytest.mark.parametrize("left", [b"", b"half of a key"])
def test_a_key_that_was_used_and_is_damaged_is_named(tmp_path: Path, left: bytes) -> None:
    asyncio.run(used(tmp_path, "r"))
    (tmp_path / FILE).write_bytes(left)
    with pytest.raises(SettingsError, match=r"seal.key is damaged: it has \d+ of 32 bytes. Restore it"):
        seal_key(settings(tmp_path))
    assert (tmp_path / FILE).read_bytes() == left


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"data folder .* cannot be written: Not a directory"):
        seal_key(settings(tmp_path / "file" / "data"))
