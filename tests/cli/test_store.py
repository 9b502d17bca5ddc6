import asyncio
import json
import os
from pathlib import Path

import pytest

from dragoman.cli import main
from dragoman.store import StoreLimits
from dragoman.store.sqlite import FILE, SqliteStore
from tests.store.samples import conversation, item, record

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """With two responses, one of them from long ago, and a conversation."""
    path = tmp_path / "data"

    async def fill() -> None:
        store = SqliteStore(path, StoreLimits())
        await store.open()
        await store.save(record("old", created_at=0.0, inputs=(item("a"),)))
        await store.save(record("new", created_at=1e9, body=b'{"x": 1}'))
        await store.create_conversation(conversation())
        await store.close()

    asyncio.run(fill())
    return str(path)


def test_stats_for_people(folder: str, capsys: Capture) -> None:
    assert main(["store", "stats", "--data-dir", folder]) == 0
    out = capsys.readouterr().out
    assert "responses         2\n" in out
    assert "conversations     1\n" in out
    assert "1970-01-01 00:00:00 UTC, kept for 30 days" in out


def test_stats_as_json(folder: str, capsys: Capture) -> None:
    assert main(["store", "stats", "--json", "--data-dir", folder, "--store-max-age", "60"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["counts"] == {"response": 2, "chat": 0, "conversation": 1, "item": 1}
    assert facts["bounds"] == {"max_bytes": 1024**3, "max_age": 60}


def test_the_folder_may_come_from_the_environment(
    folder: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAGOMAN_DATA_DIR", folder)
    assert main(["store", "vacuum"]) == 0
    assert "on disk before" in capsys.readouterr().out


def test_without_a_folder_it_is_the_users(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/nowhere")
    assert main(["store", "stats"]) == 1
    assert "no store in /nowhere/dragoman" in capsys.readouterr().err


def test_export_to_standard_output(folder: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["store", "export", "--data-dir", folder]) == 0
    lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [line["id"] for line in lines] == ["old", "new", "c"]
    assert lines[1]["body"] == {"x": 1}


def test_export_to_a_file_that_others_cannot_read(folder: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["store", "export", "--data-dir", folder, "-o", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 3
    assert oct(out.stat().st_mode & 0o777) == "0o600"


def test_a_file_that_cannot_be_written_is_named(folder: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["store", "export", "--data-dir", folder, "-o", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_looking_drops_nothing_and_makes_nothing(folder: str, tmp_path: Path) -> None:
    before = sorted(os.listdir(folder))
    for action in ("stats", "vacuum", "export"):
        assert main(["store", action, "--data-dir", folder, "--store-max-age", "1"]) == 0
        assert main(["store", action, "--data-dir", str(tmp_path / "none")]) == 1
    assert sorted(os.listdir(folder)) == before
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("which", ["memory", "none", "redis://u:secret@x"])
def test_a_store_that_cannot_be_looked_into(which: str, capsys: Capture) -> None:
    assert main(["store", "stats", "--store", which]) == 2
    err = capsys.readouterr().err
    assert which.partition(":")[0] in err
    assert "secret" not in err


def test_a_damaged_file_is_said_in_one_line(folder: str, capsys: Capture) -> None:
    (Path(folder) / FILE).write_bytes(b"nothing of the kind" * 100)
    assert main(["store", "stats", "--data-dir", folder]) == 1
    assert "not a database of dragoman" in capsys.readouterr().err
