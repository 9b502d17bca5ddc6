"""Models by their names on the command line, with a hub and a model that are real enough to answer."""

import json
from pathlib import Path

import pytest

from dragoman.cli import builtin_engines, main
from dragoman.cli.builtin_engines import local, model_file, settle
from dragoman.cli.model_info import suggest_models
from dragoman.engines.local import hardware
from dragoman.engines.local.gguf_model import LlamaModel
from dragoman.errors import ModelFileError
from dragoman.settings import Settings
from tests.support.hub import SmallHub, running
from tests.support.tiny_gguf import write_split, write_tiny

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


@pytest.mark.parametrize("command", [["models", NAME], ["doctor", NAME]])
def test_to_look_is_not_to_fetch(
    hub: SmallHub, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(command)
    assert not hub.asked
    assert "not on this machine" in "".join(capsys.readouterr())


SAFE = {"model.safetensors": b"12345678", "config.json": b"{}", "tokenizer.json": b"{}", "run.py": b"boom"}


@pytest.mark.parametrize(
    ("packages", "engine"),
    [({"vllm", "torch", "transformers"}, "vllm"), ({"torch", "transformers"}, "transformers")],
)
def test_safetensors_go_to_who_runs_them(
    hub: SmallHub, monkeypatch: pytest.MonkeyPatch, packages: set[str], engine: str
) -> None:
    hub.files = SAFE
    monkeypatch.setattr(builtin_engines, "find_spec", lambda name: name in packages or None)
    settled = settle(Settings(model="org/repo"))
    assert (settled.engine, settled.model_name) == (engine, "org/repo")
    names = sorted(path.name for path in Path(settled.model or "").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert settle(Settings(model=settled.model)).engine == engine


def test_safetensors_that_nobody_runs_are_not_fetched(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = SAFE
    monkeypatch.setattr(builtin_engines, "find_spec", lambda name: None)
    with pytest.raises(ModelFileError, match=r"dragoman\[transformers\]"):
        settle(Settings(model="org/repo"))
    assert not hub.given


def test_other_engines_get_safetensors_where_there_is_gguf_too(hub: SmallHub) -> None:
    hub.files = hub.files | SAFE
    settled = settle(Settings(model="org/repo", engine="transformers"))
    assert Path(settled.model or "").is_dir()


def test_a_split_file_counts_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = write_split(tmp_path / "m.gguf")
    assert len(parts) > 1
    assert main(["models", str(parts[0]), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["bytes"] == sum(part.stat().st_size for part in parts) and facts["name"] == "m"
    assert main(["models", str(tmp_path), "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert listed == {"name": "m", "path": str(parts[0]), "bytes": facts["bytes"]}


def test_the_headers_of_all_parts_are_checked(tmp_path: Path) -> None:
    parts = write_split(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match="pass the first, m-00001-of"):
        LlamaModel(parts[1])
    parts[-1].write_bytes(b"GGUF" + bytes([3, 0, 0, 0]) + b"\xff" * 64)
    with pytest.raises(ModelFileError, match="too short for its number of metadata"):
        LlamaModel(parts[0])
    parts[-1].unlink()
    with pytest.raises(ModelFileError, match="There is no file"):
        LlamaModel(parts[0])


def test_no_such_file_says_what_names_are() -> None:
    with pytest.raises(ModelFileError, match="hf:ORG/REPO"):
        model_file(Settings(model="llama3.2"))


def test_what_is_no_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "nothing"]) != 0
    assert "hf:ORG/REPO" in capsys.readouterr().err


def test_nothing_is_served_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", "http://127.0.0.1:9"]) == 0
    assert "No server at" in capsys.readouterr().out


def test_who_names_no_model_is_offered_what_is_here_and_fits(
    hub: SmallHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "free_memory", lambda: 8_000_000_000)
    [suggested] = suggest_models()
    assert "hf:Qwen/Qwen3-8B-GGUF:Q4_K_M" in suggested and not hub.asked
    assert main(["pull", NAME]) == 0
    assert "hf:org/repo:Q8_0" in suggest_models()[0] and len(suggest_models()) == 2
    monkeypatch.setattr(hardware, "free_memory", lambda: 1000)
    assert suggest_models() == []
