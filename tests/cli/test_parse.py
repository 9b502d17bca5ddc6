import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dragoman.cli import main

Capture = pytest.CaptureFixture[str]
SPOKEN = (
    '<think>\nhm\n</think>\n\nLet me look.\n<tool_call>\n{"name": "f", "arguments": {"n": 1.0}}\n</tool_call>'
)
TAGGED = "<tool_call>\n<function=f>\n<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>"
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"n": {"type": "string"}}}},
}


@pytest.fixture
def spoken(tmp_path: Path) -> str:
    file = tmp_path / "answer.txt"
    file.write_text(SPOKEN)
    return str(file)


def parsed(capsys: Capture, *arguments: str) -> Any:
    code = main(["parse", *arguments])
    out = capsys.readouterr()
    assert code == 0, out.err
    return json.loads(out.out)


def refused(capsys: Capture, *arguments: str) -> str:
    assert main(["parse", *arguments]) == 2
    return capsys.readouterr().err


def test_a_file(spoken: str, capsys: Capture) -> None:
    answer = parsed(capsys, "--dialect", "hermes", spoken)
    [call] = answer.pop("tool_calls")
    assert answer == {"text": "Let me look.", "reasoning": "hm"}
    assert (call["name"], call["arguments"]) == ("f", '{"n": 1.0}')
    assert call["id"]


def test_standard_input(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.write(write, "déjà".encode())
    os.close(write)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(os.fdopen(read, "rb")))
    assert parsed(capsys, "--dialect", "plain")["text"] == "déjà"


def test_an_alias_is_a_name(spoken: str, capsys: Capture) -> None:
    assert parsed(capsys, "--dialect", "qwen25", spoken)["text"] == "Let me look."


def test_parts_may_stay_in_the_text(spoken: str, capsys: Capture) -> None:
    answer = parsed(capsys, "--dialect", "hermes", "--no-calls", "--no-reasoning", spoken)
    assert answer == {"text": SPOKEN, "reasoning": "", "tool_calls": []}


def test_the_prompt_may_have_opened_reasoning(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "answer.txt"
    file.write_text("so\n</think>\n\nYes.")
    answer = parsed(capsys, "--dialect", "qwen3", "--starts-in-reasoning", str(file))
    assert (answer["reasoning"], answer["text"]) == ("so", "Yes.")


@pytest.mark.parametrize("tools", [[TOOL], TOOL, {"model": "m", "tools": [TOOL]}, [TOOL["function"]]])
def test_tools_give_types(tools: Any, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    (tmp_path / "answer.txt").write_text(TAGGED)
    flags = [
        "--dialect",
        "qwen3_coder",
        "--tools",
        str(tmp_path / "tools.json"),
        str(tmp_path / "answer.txt"),
    ]
    assert json.loads(parsed(capsys, *flags)["tool_calls"][0]["arguments"]) == {"n": "12"}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ('[\n {"type": "function",,}\n]', "line 2, column 22"),
        ("3", "no list"),
        ('[{"type": "function", "function": {"name": "f"}}, {"type": "function"}]', "Tool 2"),
        ("\udcff", "UTF-8"),
    ],
)
def test_tools_that_are_none(written: str, words: str, spoken: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "tools.json").write_bytes(written.encode("utf-8", "surrogateescape"))
    error = refused(capsys, "--dialect", "hermes", "--tools", str(tmp_path / "tools.json"), spoken)
    assert words in error
    assert '"function": {"name"' in error


def test_what_is_not_there(spoken: str, capsys: Capture) -> None:
    assert "No such file" in refused(capsys, "--dialect", "hermes", "nowhere.txt")
    assert "No such file" in refused(capsys, "--dialect", "hermes", "--tools", "nowhere.json", spoken)
    assert "Did you mean 'hermes'" in refused(capsys, "--dialect", "hermse", spoken)
    assert "--dialect" in refused(capsys, spoken)


def test_a_stream_tells_each_event_at_once() -> None:
    """Each piece is written only when the events of the one before have been read."""
    command = [sys.executable, "-m", "dragoman", "parse", "--dialect", "hermes", "--stream"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        items = []
        for piece in ("Hi there", ' é<tool_call>{"name": "f", "arguments": {"a"', ": 1}}</tool_call>"):
            process.stdin.write(piece.encode())
            process.stdin.flush()
            items.append(json.loads(process.stdout.readline()))
        process.stdin.close()
        items += [json.loads(line) for line in process.stdout]
    assert [one["kind"] for one in items[:3]] == ["text", "text", "call_open"]
    assert "".join(one.get("text", "") for one in items) == "Hi there é"
    assert items[2]["name"] == "f" and items[2]["id"]
    assert "".join(one.get("arguments", "") for one in items) == '{"a": 1}'
    assert items[-1] == {"kind": "call_close", "call": 0}
