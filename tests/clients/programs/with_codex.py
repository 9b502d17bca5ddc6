"""Codex, the coding agent, over SSE and over a socket: it writes a file as it is told, by its shell."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from tests.clients import cases, coding
from tests.clients.cases import case

BEFORE = """\
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
analytics = { enabled = false }
"""
AFTER = "request_max_retries = 0\nstream_max_retries = 0\n"


def config_of(url, sockets):
    """That of the page, so that nobody is asked, and nothing is tried twice."""
    text = BEFORE + coding.from_page("codex", "toml", url) + AFTER
    return text.replace("supports_websockets = true", f"supports_websockets = {sockets}")


def codex(url, text, sockets="false"):
    """What it said of itself, and what it wrote."""
    with tempfile.TemporaryDirectory() as home:
        Path(home, "config.toml").write_text(config_of(url, sockets))
        work = Path(home, "work")
        work.mkdir()
        program = str(Path(os.environ["CLIENT_BIN"], "codex"))
        done = subprocess.run(
            [program, "exec", "--json", "--skip-git-repo-check", text],
            cwd=work,
            env={**os.environ, "CODEX_HOME": home},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        items = [event["item"] for event in events if event["type"] == "item.completed"]
        out = work / "out.txt"
        return items, out.read_text() if out.exists() else ""


def texts(items, kind):
    return [item["text"] for item in items if item["type"] == kind]


@case("responses", "stream")
def stream(url):
    items, _ = codex(url, cases.NAME_A_COLOUR)
    assert texts(items, "agent_message") == [cases.COLOUR], items


@case("responses", "tools")
def tools(url):
    items, written = codex(url, cases.WRITE_A_FILE)
    assert (written.strip(), texts(items, "agent_message")) == (cases.FILE, [cases.WRITTEN]), items


@case("responses", "reasoning")
def reasoning(url):
    items, _ = codex(url, cases.THINK_OF_A_COLOUR)
    assert texts(items, "reasoning") == [cases.THOUGHT], items


@case("responses (socket)", "stream")
def socket_stream(url):
    items, _ = codex(url, cases.NAME_A_COLOUR, sockets="true")
    assert texts(items, "agent_message") == [cases.COLOUR], items
    # It says so where it has to do without its socket.
    assert not [item for item in items if "Falling back" in item.get("message", "")], items


@case("responses (socket)", "tools")
def socket_tools(url):
    items, written = codex(url, cases.WRITE_A_FILE, sockets="true")
    assert (written.strip(), texts(items, "agent_message")) == (cases.FILE, [cases.WRITTEN]), items


if __name__ == "__main__":
    cases.main(globals())
