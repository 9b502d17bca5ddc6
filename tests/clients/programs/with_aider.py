"""aider, the coding agent, which asks by LiteLLM and reads edits out of the text."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients import cases
from tests.clients.cases import MODEL, case

FLAGS = ("--no-git", "--yes-always", "--no-check-update", "--no-show-release-notes", "--analytics-disable")


def aider(url, *words):
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        command = [
            sys.executable,
            "-m",
            "aider",
            "--model",
            f"openai/{MODEL}",
            "--no-show-model-warnings",
            *FLAGS,
        ]
        done = subprocess.run(
            [*command, *words, "--message", cases.NAME_A_COLOUR],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert Path(folder).exists()
        return done.stdout, done.stderr[-300:]


@case("chat", "plain")
def plain(url):
    said, why = aider(url, "--no-stream")
    assert cases.COLOUR in said, why + said[-300:]


@case("chat", "stream")
def stream(url):
    said, why = aider(url, "--stream", "--no-pretty")
    assert cases.COLOUR in said, why + said[-300:]


if __name__ == "__main__":
    cases.main(globals())
