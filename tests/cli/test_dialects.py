import json
from pathlib import Path

import pytest

from dragoman.cli import dialects as command
from dragoman.cli import main
from dragoman.dialects.registry import list_dialects

Capture = pytest.CaptureFixture[str]


def shown(capsys: Capture, *arguments: str) -> str:
    assert main(["dialects", *arguments]) == 0
    return capsys.readouterr().out


def test_all_are_listed(capsys: Capture) -> None:
    lines = shown(capsys).splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(list_dialects())
    assert "reasoning, calls  Hermes 2 Pro" in next(line for line in lines if line.startswith("hermes"))


def test_one_with_its_example(capsys: Capture) -> None:
    text = shown(capsys, "qwen25")
    assert text.startswith("hermes\n")
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in text


def test_examples_are_read_back_as_what_they_say(capsys: Capture, tmp_path: Path) -> None:
    for one in json.loads(shown(capsys, "--json", "--examples")):
        file = tmp_path / "answer.txt"
        file.write_text(one["example"])
        assert main(["parse", "--dialect", one["name"], str(file)]) == 0
        answer = json.loads(capsys.readouterr().out)
        calls = [(call["name"], json.loads(call["arguments"])) for call in answer["tool_calls"]]
        assert calls == ([("get_weather", {"city": "Paris"})] if one["calls"] else []), one["name"]
        assert bool(answer["reasoning"]) == one["reasoning"], one["name"]
        assert "Let me look." in answer["text"], one["name"]


def test_pages_of_all(capsys: Capture) -> None:
    text = shown(capsys, "--examples")
    assert all(f"\n\n{name}\n" in f"\n\n{text}" for name in list_dialects())


def test_json_of_one(capsys: Capture) -> None:
    result = json.loads(shown(capsys, "plain", "--json"))
    assert (result["reasoning"], result["calls"], result["example"]) == (False, False, "Let me look.")


def test_unknown_name(capsys: Capture) -> None:
    assert main(["dialects", "deepseek_v33"]) == 2
    error = capsys.readouterr().err
    assert "Unknown dialect 'deepseek_v33'. Did you mean 'deepseek_v3'?" in error
    assert "`dragoman dialects`" in error.partition("hint:")[2]


@pytest.mark.parametrize(("width", "columns"), [(30, 2), (40, 3), (90, 4)])
def test_narrow_terminals(width: int, columns: int) -> None:
    rows = [["name_of_dialect", "calls", "m" * 80, "a" * 80]]
    head, fitted = command.fit_width(["name", "has", "models", "aliases"], rows, width)
    assert len(head) == columns
    assert sum(map(len, fitted[0])) + 2 * (columns - 1) <= width
