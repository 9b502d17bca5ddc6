"""Codex, the coding agent, with a model that runs one command and then is done."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.engines.scripted import Script, ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from dragoman.types import Job
from tests.docs.support import blocks
from tests.support.outside import bare_environment, node_program
from tests.support.tool_model import NAME, call, prompt_of, tool_model

UNATTENDED = """\
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
analytics = { enabled = false }
"""
ONCE = "request_max_retries = 0\nstream_max_retries = 0\n"
[DOCUMENTED] = blocks("docs/clients/codex.md", "toml")
RAN = "Process exited with code 0"
"""What Codex tells the model of a command that went well."""


def said(job: Job) -> Script:
    if RAN in prompt_of(job):
        return say("It is written.")
    # Codex keeps the reasoning and sends it back, sealed, with the result.
    return say(
        "<think>\nA command will do.\n</think>\n\n" + call("exec_command", cmd="echo by a tool > out.txt")
    )


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return tool_model(said, context=200_000)


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine) -> Iterator[str]:
    with background(engine, Settings(port=0, store="memory")) as text:
        yield text


def codex(url: str, home: Path, *, sockets: bool) -> list[dict[str, Any]]:
    """What one run of Codex tells of itself."""
    program = node_program("codex")
    config = DOCUMENTED.replace("MODEL", NAME).replace("http://127.0.0.1:8000", url)
    if not sockets:
        config = config.replace("supports_websockets = true\n", "")
    (home / "config.toml").write_text(UNATTENDED + config + ONCE)
    work = home / "work"
    work.mkdir()
    done = subprocess.run(
        [program, "exec", "--json", "--skip-git-repo-check", "Write out.txt"],
        cwd=work,
        env=bare_environment(home, CODEX_HOME=str(home)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in done if item["type"] == kind]


@pytest.mark.parametrize("sockets", [False, True], ids=["stream", "websocket"])
def test_a_tool_loop(url: str, engine: ScriptedEngine, tmp_path: Path, sockets: bool) -> None:
    before = len(engine.jobs)
    events = codex(url, tmp_path, sockets=sockets)
    assert events[-1]["type"] == "turn.completed", events
    assert [item["text"] for item in items(events, "reasoning")] == ["A command will do."]
    assert [item["exit_code"] for item in items(events, "command_execution")] == [0]
    assert [item["text"] for item in items(events, "agent_message")] == ["It is written."]
    assert (tmp_path / "work" / "out.txt").read_text() == "by a tool\n"
    assert len(engine.jobs) - before == 2, "warming up runs nothing"
    # Codex says that it does without its socket, if it does.
    assert not [item for item in items(events, "error") if "Falling back" in item["message"]]


@pytest.mark.parametrize("sockets", [False, True], ids=["stream", "websocket"])
def test_overflow_is_understood(tmp_path: Path, sockets: bool) -> None:
    with background(tool_model(said, context=2048), Settings(port=0, store="memory")) as url:
        events = codex(url, tmp_path, sockets=sockets)
    assert events[-1]["type"] == "turn.failed"
    assert "context window" in events[-1]["error"]["message"]
