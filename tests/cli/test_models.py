import json
from pathlib import Path

import pytest

from dragoman.cli import main
from dragoman.cli.model_info import first_line, quantization
from tests.cli.conftest import Fake

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def nobody_on_the_usual_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_PORT", "1")


def test_a_servers_models(fake: Fake, capsys: Capture) -> None:
    assert main(["models", "--url", fake.url]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["fake-1", "512", "dragoman"]
    assert main(["models", "--url", fake.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["id"] == "fake-1"


def test_a_running_server_and_the_cache(
    fake: Fake, capsys: Capture, monkeypatch: pytest.MonkeyPatch, weights: Path
) -> None:
    monkeypatch.setenv("DRAGOMAN_PORT", fake.url.rpartition(":")[2])
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert "fake-1" in text
    assert str(weights) in text


def test_an_empty_cache(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAGOMAN_CACHE", str(tmp_path / "none"))
    assert main(["models"]) == 0
    assert "not downloaded yet" in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cached"]["bytes"] == 0


def test_what_a_file_holds(weights: Path, capsys: Capture) -> None:
    assert main(["models", str(weights)]) == 0
    text = capsys.readouterr().out
    for part in ("llama", "135M", "Q4_1", "8192 tokens", "<|im_end|>", "{% for message in messages %}"):
        assert part in text
    assert main(["models", str(weights), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["vocabulary"], facts["context"], facts["fills_gaps"]) == (49152, 8192, False)


def test_a_file_that_is_not_there(capsys: Capture) -> None:
    assert main(["models", "gone.gguf"]) == 1
    assert "There is no file gone.gguf." in capsys.readouterr().err


def test_small_texts() -> None:
    assert quantization("llama 1B Q4_K - Medium") == "Q4_K - Medium"
    assert quantization("") == ""
    assert first_line("\n  a\nb") == "a"
