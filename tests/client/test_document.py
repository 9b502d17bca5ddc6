"""The code in docs/client.md does what the text beside it says."""

from pathlib import Path

import pytest

from dragoman.engines.scripted import END_ID
from tests.docs.test_examples import run
from tests.http.conftest import Served, parrot

__all__ = ["parrot"]


def test_the_guide(parrot: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guide = run(tmp_path, "docs/client.md")
    assert guide.say(parrot.url, "Pieces of eight!") == "Pieces of eight!"
    assert capsys.readouterr().out == "Pieces of eight!"
    assert [token.id for token in guide.tokens(parrot.url, "hi")] == [*b"hi", END_ID]
    assert guide.patient.chunk == 60
