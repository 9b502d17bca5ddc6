"""`dragoman keys`: a key is shown once, and its file is changed by one at a time."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman.cli import main
from dragoman.http.key_file import hash_key, read_key_file


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAGOMAN_API_KEY_FILE", str(tmp_path / "keys"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "keys"


def test_a_key_is_shown_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "qwen*", "--tokens-per-minute", "5", "--tokens-per-day", "9"]
    assert main(["keys", "add", "ci", *flags]) == 0
    key = capsys.readouterr().out.strip()
    [kept] = read_key_file(str(file))
    assert (kept.name, kept.sha256, kept.models) == ("ci", hash_key(key), ["qwen*"])
    assert (kept.tokens_per_minute, kept.tokens_per_day, kept.admin) == (5, 9, False)
    assert main(["keys", "list"]) == 0
    shown = capsys.readouterr().out
    assert key[:11] in shown and "qwen*" in shown and key not in shown


def test_a_key_of_ones_own(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "my-own-0123456789-0123456789"
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{own}\n"))
    assert main(["keys", "add", "mine", "--stdin", "--admin"]) == 0
    assert own not in capsys.readouterr().out
    assert [(key.sha256, key.admin) for key in read_key_file(str(file))] == [(hash_key(own), True)]


def test_a_short_key_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("secret\n"))
    assert main(["keys", "add", "mine", "--stdin"]) == 2
    assert not file.exists()
    assert "24" in capsys.readouterr().err


def test_revoked_by_name_or_by_hash(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("sk-plain\n")
    main(["keys", "add", "ci"])
    assert main(["keys", "revoke", "ci"]) == 0
    assert file.read_text() == "sk-plain\n"
    assert main(["keys", "revoke", hash_key("sk-plain")[:8]]) == 0
    assert file.read_text() == ""
    assert main(["keys", "revoke", "ci"]) == 2
    assert "no key named ci" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["add"], "takes a name"),
        (["add", "x", "--tokens-per-day", "0"], "above 0"),
        (["sell"], "invalid choice"),
    ],
)
def test_what_is_wrong_is_said(
    file: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["keys", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_a_file_it_says_how_to_name_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DRAGOMAN_API_KEY_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "list"]) == 2
    assert "--api-key-file" in capsys.readouterr().err


ADD_MANY = """
import sys
from dragoman.http.key_file import add_key, describe_key, new_key
for number in range(10):
    add_key(sys.argv[1], describe_key(new_key(), name=f"{sys.argv[2]}-{number}"))
"""


def test_no_change_is_lost_when_several_are_made_at_once(file: Path) -> None:
    command = [sys.executable, "-c", ADD_MANY, str(file)]
    running = [subprocess.Popen([*command, name]) for name in ("a", "b", "c")]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert len(read_key_file(str(file))) == 30
    assert [each.name for each in file.parent.iterdir()] == ["keys"]
