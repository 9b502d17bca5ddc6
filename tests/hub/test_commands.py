"""Models by their names on the command line, with a hub and a model that are real enough to answer."""

import json
from pathlib import Path

import pytest

from dragoman.cli import main
from dragoman.cli.own_engines import local, model_file
from dragoman.settings import Settings
from tests.support.hub import SmallHub, running
from tests.support.tiny_gguf import write_tiny

NAME = "hf:org/repo"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    file = write_tiny(tmp_path / "tiny.gguf")
    with running(SmallHub({"tiny-Q8_0.gguf": file.read_bytes(), "README.md": b"hi"})) as started:
        monkeypatch.setenv("HF_ENDPOINT", started.url)
        yield started


def test_pull_list_show_and_rm(hub: SmallHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", NAME]) == 0 and "Q8_0" in capsys.readouterr().out
    assert main(["pull", NAME]) == 0 and "hf:org/repo:Q8_0" in capsys.readouterr().out
    assert main(["list"]) == 0 and "hf:org/repo:Q8_0" in capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert Path(listed["path"]).exists()
    assert main(["rm", NAME]) == 0 and "deleted" in capsys.readouterr().out
    assert not Path(listed["path"]).exists()
    assert main(["rm", NAME]) != 0


def test_a_model_that_is_served_by_its_name_is_fetched(hub: SmallHub) -> None:
    for name in (NAME, "org/repo", f"{NAME}:Q8_0", "hf.co/org/repo"):
        assert model_file(Settings(model=name)).name == "tiny-Q8_0.gguf"
    assert hub.given == len(hub.files["tiny-Q8_0.gguf"])


def test_it_answers(hub: SmallHub) -> None:
    engine = local(Settings(model=NAME, runner="llamacpp", threads=1, slots=1, context=64))
    try:
        assert engine.card.name == "tiny-Q8_0"
    finally:
        engine.close()


def test_what_is_no_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "nothing"]) != 0
    assert "hf:ORG/REPO" in capsys.readouterr().err


def test_nothing_is_served_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", "http://127.0.0.1:9"]) == 0
    assert "Nothing is served" in capsys.readouterr().out
