"""The code in docs/client.md does what the text beside it says."""

from pathlib import Path

import pytest

from dragoman.engines.scripted import END_ID, ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.docs.test_examples import run
from tests.http.conftest import RunningServer, parrot
from tests.media.samples import picture

__all__ = ["parrot"]


def test_the_guide(parrot: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guide = run(tmp_path, "docs/client.md")
    assert guide.say(parrot.url, "Pieces of eight!") == "Pieces of eight!"
    assert capsys.readouterr().out == "Pieces of eight!"
    assert [token.id for token in guide.tokens(parrot.url, "hi")] == [*b"hi", END_ID]
    assert guide.patient.chunk == 60


def test_its_picture(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(picture("png"))
    engine = ScriptedEngine(say("A cat."), modalities=("image",))
    with background(engine, Settings(port=0)) as url:
        assert run(tmp_path, "docs/client.md").look(url, tmp_path / "cat.png") == "A cat."
