"""Batches without a server: their states, and who goes on with them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dragoman.api.batches import LineReply, LineRequest
from dragoman.errors import Conflict, NotFound
from dragoman.store.disk import read_metadata, write_metadata
from dragoman.store.records import StoredBatch
from tests.batches.support import begin, desk, echo, ended, jsonl, line, read_lines


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


async def stuck(asked: LineRequest) -> LineReply:
    if asked.custom_id == "stuck":
        await asyncio.sleep(600)
    return await echo(asked)


async def content(files: Any, id_: str | None) -> list[dict[str, Any]]:
    if id_ is None:
        return []
    _, opened = await files.open("ann", id_)
    return read_lines(b"".join([piece async for piece in files.pieces(opened)]))


LINES = jsonl([line("one"), line("two", "bad"), line("stuck")])


def test_a_batch_goes_through_its_states(tmp_path: Path) -> None:
    async def work() -> None:
        files, manager = desk(tmp_path)
        batch = await begin(manager, LINES, metadata={"a": "b"}, keep_s=3600)
        assert (batch.status, batch.expires_at - batch.created_at) == ("validating", 24 * 3600)
        over = await ended(manager, batch.id)
        assert (over.status, over.total, over.completed, over.failed) == ("completed", 3, 2, 1)
        assert list(over.at) == ["in_progress", "finalizing", "completed"]
        assert {one["custom_id"] for one in await content(files, over.output_file)} == {"one", "stuck"}
        (bad,) = await content(files, over.error_file)
        assert (bad["custom_id"], bad["error"]) == ("two", {"code": "no", "message": "No."})
        assert (await files.get("ann", over.output_file or "")).purpose == "batch_output"
        while (tmp_path / "ann" / batch.id).exists():
            await asyncio.sleep(0.01)
        await manager.stop()

    asyncio.run(work())


def test_one_that_is_cancelled_keeps_what_is_done(tmp_path: Path) -> None:
    async def work() -> None:
        files, manager = desk(tmp_path, stuck)
        batch = await begin(manager, LINES)
        while (await manager.get("openai", "ann", batch.id)).completed < 1:
            await asyncio.sleep(0.01)
        stored_batch = await manager.cancel("openai", "ann", batch.id)
        assert stored_batch.status == "cancelling" and stored_batch.at["cancelling"]
        over = await ended(manager, batch.id)
        assert (over.status, over.completed, over.failed, over.undone) == ("cancelled", 1, 1, 1)
        assert over.at["cancelled"] >= over.at["cancelling"]
        undone = {one["custom_id"]: one["error"]["code"] for one in await content(files, over.error_file)}
        assert undone == {"two": "no", "stuck": "batch_cancelled"}
        assert (await manager.cancel("openai", "ann", batch.id)).status == "cancelled"
        await manager.stop()

    asyncio.run(work())


def test_one_that_is_not_done_in_its_time_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.batches.manager.NOTE_S", 0.01)
    clock = Clock()

    async def work() -> None:
        files, manager = desk(tmp_path, stuck, clock)
        batch = await begin(manager, LINES)
        while (await manager.get("openai", "ann", batch.id)).completed < 1:
            await asyncio.sleep(0.01)
        clock.now += 24 * 3600
        over = await ended(manager, batch.id)
        assert (over.status, over.completed) == ("expired", 1)
        codes = {one["custom_id"]: one["error"]["code"] for one in await content(files, over.error_file)}
        assert codes == {"two": "no", "stuck": "batch_expired"}
        await manager.stop()

    asyncio.run(work())


def test_a_server_that_comes_later_goes_on_and_two_never_make_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dragoman.batches.manager.POLL_INTERVAL_S", 0.01)
    asked: list[str] = []

    async def noted(one: LineRequest) -> LineReply:
        asked.append(one.custom_id)
        return await echo(one)

    async def work() -> None:
        _, first = desk(tmp_path, stuck)
        _, second = desk(tmp_path, noted)
        batch = await begin(first, LINES)
        while (await first.get("openai", "ann", batch.id)).completed < 1:
            await asyncio.sleep(0.01)
        await second.start()
        await asyncio.sleep(0.1)
        assert asked == []
        await first.stop()
        over = await ended(second, batch.id)
        assert (over.status, over.completed, over.failed) == ("completed", 2, 1)
        assert asked == ["stuck"]
        await second.stop()

    asyncio.run(work())


@pytest.mark.parametrize("state", ["finalizing", "in_progress", "validating"])
def test_every_state_can_be_begun_again(tmp_path: Path, state: str) -> None:
    """Even where all is done, or half of what ends a batch."""

    async def work() -> None:
        files, manager = desk(tmp_path)
        batch = await begin(manager, LINES)
        over = await ended(manager, batch.id)
        folder = tmp_path / "ann"
        work = folder / batch.id
        while work.exists():
            await asyncio.sleep(0.01)
        work.mkdir()
        (work / "input").write_bytes(LINES)
        if state != "finalizing":
            (folder / (over.output_file or "")).rename(work / "output")
            (folder / f"{over.output_file}.json").unlink()
        metadata = read_metadata(folder, batch.id, StoredBatch)
        assert metadata is not None
        named = {} if state == "finalizing" else {"output_file": None, "error_file": None, "ends": None}
        write_metadata(folder, batch.id, replace(metadata, status=state, **named))
        _, again = desk(tmp_path)
        await again.start()
        over = await ended(again, batch.id)
        assert (over.status, over.completed) == ("completed", 2)
        assert {one["custom_id"] for one in await content(files, over.output_file)} == {"one", "stuck"}
        await again.stop()

    asyncio.run(work())


def test_the_same_key_gives_the_same_batch_and_other_words_a_conflict(tmp_path: Path) -> None:
    async def work() -> None:
        _, manager = desk(tmp_path)
        first = await begin(manager, LINES, key="k", metadata={"a": "b", "c": "d"})
        again = await begin(manager, LINES, key="k", metadata={"c": "d", "a": "b"})
        assert (again.id, again.created_at) == (first.id, first.created_at)
        with pytest.raises(Conflict):
            await begin(manager, LINES, key="k", metadata={"a": "x"})
        assert (await begin(manager, LINES, key="other")).id != first.id
        await manager.stop()

    asyncio.run(work())


def test_what_is_another_s_or_of_another_kind_is_not_there(tmp_path: Path) -> None:
    async def work() -> None:
        _, manager = desk(tmp_path)
        batch = await begin(manager, LINES)
        for kind, owner, id_ in (
            ("openai", "bob", batch.id),
            ("anthropic", "ann", batch.id),
            ("openai", "ann", ".."),
        ):
            with pytest.raises(NotFound):
                await manager.get(kind, owner, id_)
            with pytest.raises(NotFound):
                await manager.cancel(kind, owner, id_)
        await manager.stop()

    asyncio.run(work())
