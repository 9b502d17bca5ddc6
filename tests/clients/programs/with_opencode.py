"""opencode, the coding agent: it is told to write a file, and does it by its shell."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from tests.clients import cases
from tests.clients.cases import MODEL, case

PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "local",
    "models": {MODEL: {"name": MODEL, "tool_call": True, "reasoning": True}},
}


def opencode(url, text):
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "provider": {"local": {**PROVIDER, "options": {"baseURL": url, "apiKey": "none"}}},
            "autoupdate": False,
            "share": "disabled",
            "permission": {"bash": "allow", "edit": "allow"},
        }
        Path(folder, "opencode.json").write_text(json.dumps(config))
        command = [str(Path(os.environ["CLIENT_BIN"], "opencode")), "run", "-m", f"local/{MODEL}", text]
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        out = Path(folder, "out.txt")
        return done.stdout, done.stderr[-300:], out.read_text() if out.exists() else ""


@case("chat", "stream")
def stream(url):
    said, why, _ = opencode(url, cases.NAME_A_COLOUR)
    assert cases.COLOUR in said, why


@case("chat", "tools")
def tools(url):
    said, why, written = opencode(url, cases.WRITE_A_FILE)
    assert written.strip() == cases.FILE, why
    assert cases.WRITTEN in said, why


if __name__ == "__main__":
    cases.main(globals())
