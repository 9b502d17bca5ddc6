"""Which engine a name stands for."""

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dragoman.cli import engine as finding
from dragoman.cli.engine import engine_of
from dragoman.engines.asyncllm import AsyncLLMEngine
from dragoman.engines.scripted import ScriptedEngine
from dragoman.errors import SettingsError
from dragoman.settings import Settings

MODULE = """
from dragoman.engines.scripted import ByteTokenizer, ScriptedEngine, say

ready = ScriptedEngine(say("ready"))
number = 7


def from_settings(settings):
    engine = ScriptedEngine(say("made"))
    engine.card.name = settings.model_name
    return engine


def from_nothing():
    return ScriptedEngine(say("made"))


class Broken:
    def __init__(self):
        raise RuntimeError("no GPU")


class Contract:
    tokenizer = ByteTokenizer()
    max_model_len = 64

    async def generate_request(self, obj):
        yield {}
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "their_engines.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("their_engines", None)


def made(name: str) -> object:
    return engine_of(Settings(engine=f"their_engines:{name}", model_name="theirs"))


@pytest.mark.parametrize("name", ["ready", "from_settings", "from_nothing"])
def test_an_object_in_the_folder_can_be_named(name: str) -> None:
    assert isinstance(made(name), ScriptedEngine)


def test_what_makes_an_engine_is_given_the_settings() -> None:
    engine = made("from_settings")
    assert isinstance(engine, ScriptedEngine)
    assert engine.card.name == "theirs"


def test_an_engine_of_the_other_contract_is_taken_too() -> None:
    assert isinstance(made("Contract"), AsyncLLMEngine)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("their_engines:nothing", "has no nothing"),
        ("their_engines:number", "neither an engine"),
        ("their_engines:Broken", "cannot be created: RuntimeError"),
        ("no_such_module:x", "needs the module no_such_module"),
        ("loca", "There is no engine `loca`; choose from local, transformers, vllm"),
        ("transformers", "needs `model`"),
        ("vllm", "needs `model`"),
    ],
)
def test_a_name_that_is_wrong_says_so(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        engine_of(Settings(engine=name))


def test_a_package_brings_engines_by_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    entry = EntryPoint("theirs", "their_engines:from_nothing", finding.GROUP)
    monkeypatch.setattr(finding, "entry_points", lambda group: [entry] if group == finding.GROUP else [])
    assert isinstance(engine_of(Settings(engine="theirs")), ScriptedEngine)


def test_arguments_that_an_engine_does_not_have_are_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="no_such"):
        engine_of(Settings(engine="transformers", model="m", engine_args={"no_such": 1}))
    with pytest.raises(SettingsError, match="engine_args"):
        engine_of(Settings(engine_args={"no_such": 1}))
