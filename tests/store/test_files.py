"""The shelf of files: what has had its time goes, and what was half written is never there."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from dragoman.errors import DragomanError, NotFound, StoreUnavailable
from dragoman.store.files import LEFT_S, FileStore, Quota, StoredFile

T = TypeVar("T")
QUOTA = Quota(files=10, bytes=1000, file_bytes=1000)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def shelf(folder: Path, clock: Callable[[], float] | None = None) -> FileStore:
    return FileStore(folder, QUOTA, clock=clock)


async def put(there: FileStore, content: bytes = b"hi", keep_s: int | None = None) -> StoredFile:
    async with there.incoming("ann") as incoming:
        await incoming.write(content)
        return await incoming.commit("a", "batch", keep_s)


def run(work: Awaitable[T]) -> T:
    async def awaited() -> T:
        return await work

    return asyncio.run(awaited())


def test_what_has_had_its_time_is_not_there_and_then_is_swept(tmp_path: Path) -> None:
    clock = Clock()

    async def work() -> None:
        there = shelf(tmp_path, clock)
        file, stays = await put(there, keep_s=3600), await put(there)
        clock.now += 3601
        with pytest.raises(NotFound):
            await there.get("ann", file.id)
        page = await there.page("ann", after=None, limit=5, descending=False)
        assert page.data == [stays]
        await there.sweep()
        assert sorted(os.listdir(tmp_path / "ann")) == [stays.id, f"{stays.id}.json"]

    run(work())


def test_nothing_is_left_of_what_was_not_kept(tmp_path: Path) -> None:
    async def work() -> None:
        there = shelf(tmp_path)
        with pytest.raises(ValueError, match="cut off"):
            async with there.incoming("ann") as incoming:
                await incoming.write(b"x" * 900)
                raise ValueError("cut off")
        assert os.listdir(tmp_path / "ann") == []
        # And it does not count any more.
        await put(there, b"x" * 900)

    run(work())


def test_what_a_killed_server_was_writing_is_swept_when_it_is_old(tmp_path: Path) -> None:
    left = tmp_path / "ann" / ".new-1"
    left.parent.mkdir()
    left.write_bytes(b"half")

    async def work() -> None:
        await shelf(tmp_path).sweep()
        assert left.exists()
        os.utime(left, (1, os.stat(left).st_mtime - LEFT_S - 1))
        await shelf(tmp_path).sweep()
        assert not left.exists()

    run(work())


def test_files_that_come_at_the_same_time_share_the_quota(tmp_path: Path) -> None:
    async def work() -> None:
        there = shelf(tmp_path)
        items = await asyncio.gather(*(put(there, b"x" * 400) for _ in range(4)), return_exceptions=True)
        refused = [one for one in items if isinstance(one, DragomanError)]
        page = await there.page("ann", after=None, limit=5, descending=False)
        assert len(page.data) + len(refused) == 4
        assert sum(file.bytes for file in page.data) <= QUOTA.bytes
        assert {error.code for error in refused} == {"quota_exceeded"}

    run(work())


def test_a_folder_that_cannot_be_written_is_said_without_its_name(tmp_path: Path) -> None:
    (tmp_path / "ann").write_text("in the way")
    with pytest.raises(StoreUnavailable) as failed:
        run(put(shelf(tmp_path)))
    assert str(tmp_path) not in failed.value.message


@pytest.mark.parametrize(
    "id_", ["", "..", "../ann", "file-", "file-" + "0" * 31 + "/", "x" * 1000, "\0", "file-1.json"]
)
def test_any_text_may_be_asked_for(tmp_path: Path, id_: str) -> None:
    with pytest.raises(NotFound):
        run(shelf(tmp_path).get("ann", id_))
