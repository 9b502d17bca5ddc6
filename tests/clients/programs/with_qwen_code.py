"""Qwen Code, the coding agent: it is told to write a file, and does it by its shell."""

import os
import subprocess
import tempfile
from pathlib import Path

from tests.clients import cases
from tests.clients.cases import MODEL, case


def qwen(url, text):
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": "none",
            "OPENAI_MODEL": MODEL,
            "QWEN_TELEMETRY_ENABLED": "false",
        }
        program = str(Path(os.environ["CLIENT_BIN"], "qwen"))
        done = subprocess.run(
            [program, "--auth-type", "openai", "--yolo", "-p", text],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        out = Path(folder, "out.txt")
        return done.stdout, done.stderr[-300:], out.read_text() if out.exists() else ""


@case("chat", "stream")
def stream(url):
    said, why, _ = qwen(url, cases.NAME_A_COLOUR)
    assert cases.COLOUR in said, why


@case("chat", "tools")
def tools(url):
    said, why, written = qwen(url, cases.WRITE_A_FILE)
    assert written.strip() == cases.FILE, why
    assert cases.WRITTEN in said, why


if __name__ == "__main__":
    cases.main(globals())
