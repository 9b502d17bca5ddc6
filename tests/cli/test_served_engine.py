"""Which engines of a server come back, and which may have a process of their own."""

from pathlib import Path

import pytest

from dragoman.cli import main
from dragoman.cli.engine import EngineOpener, isolate, make_served_engine
from dragoman.engines.isolated import IsolatedEngine
from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.engines.supervisor import SupervisedEngine
from dragoman.errors import SettingsError
from dragoman.settings import Settings

Capture = pytest.CaptureFixture[str]
OBJECT = """
from dragoman.engines.scripted import ScriptedEngine, say
ready = ScriptedEngine(say("hi"))
def make(): return ScriptedEngine(say("hi"))
"""


@pytest.fixture
def mine(tmp_path: Path) -> None:
    (tmp_path / "engines_of_mine.py").write_text(OBJECT)


@pytest.mark.usefixtures("mine")
def test_what_is_made_comes_back_and_what_is_there_once_does_not() -> None:
    assert isinstance(make_served_engine(Settings(engine="engines_of_mine:make")), SupervisedEngine)
    assert isinstance(make_served_engine(Settings(engine="engines_of_mine:ready")), ScriptedEngine)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(engine="vllm", isolate_engine=True), "other processes"),
        (Settings(engine="remote", isolate_engine=True), "other processes"),
        (Settings(engine="remote", engine_timeout=3), "leave out `engine_timeout`"),
        (Settings(engine="engines_of_mine:ready", engine_timeout=3), "leave out `engine_timeout`"),
        (Settings(engine="engines_of_mine:make", isolate_engine=True), "set `tokenizer`"),
    ],
)
def test_what_cannot_be_is_told(settings: Settings, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make_served_engine(settings)


def test_the_local_engine_is_opened_again_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def engine_of(settings: Settings) -> ScriptedEngine:
        seen.append(settings)
        details = {"runner": "OpenVINO 1.0, bf16 keys and values"}
        card = ModelCard(name="m", max_model_len=2560, slots=8, details=details)
        return ScriptedEngine(say("hi"), card=card)

    monkeypatch.setattr("dragoman.cli.engine.engine_of", engine_of)
    opener = EngineOpener(Settings(threads=3))
    opener()
    opener()
    assert [(s.slots, s.context, s.threads) for s in seen] == [(None, None, 3), (8, 2560, 3)]
    assert [s.runner for s in seen] == ["auto", "openvino"]


def test_a_wrong_file_is_told_by_the_process_that_could_not_open_it(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    assert main(["serve", "text.gguf", "--port", "0", "--isolate-engine"]) == 1
    assert "is not a GGUF file" in capsys.readouterr().err


def test_an_isolated_engine_knows_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_API_KEY", "CANARY")
    items: list[object] = []
    monkeypatch.setattr(IsolatedEngine, "open", lambda *item: items.extend(item))
    isolate(Settings(model="m.gguf", api_key=["CANARY"], store="postgresql://u:CANARY@h/d"))
    assert "m.gguf" in str(items)
    assert "PATH" in str(items)
    assert "CANARY" not in str(items)
