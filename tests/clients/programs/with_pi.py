"""pi, the coding agent, by both APIs: it is told to write a file, and does it by its shell."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from tests.clients import cases
from tests.clients.cases import MODEL, case

DESCRIBED = {
    "id": MODEL,
    "name": MODEL,
    "reasoning": False,
    "input": ["text"],
    "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    "contextWindow": 200_000,
    "maxTokens": 4096,
}


def pi(url, api, text):
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home", ".pi", "agent")
        home.mkdir(parents=True)
        provider = {"baseUrl": url, "api": api, "apiKey": "none", "models": [DESCRIBED]}
        (home / "models.json").write_text(json.dumps({"providers": {"local": provider}}))
        program = str(Path(os.environ["CLIENT_BIN"], "pi"))
        done = subprocess.run(
            [program, "--provider", "local", "--model", MODEL, "-p", text],
            cwd=folder,
            env={**os.environ, "HOME": str(Path(folder, "home"))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        out = Path(folder, "out.txt")
        return done.stdout, done.stderr[-300:], out.read_text() if out.exists() else ""


def stream(url, api):
    said, why, _ = pi(url, api, cases.NAME_A_COLOUR)
    assert cases.COLOUR in said, why


def tools(url, api):
    said, why, written = pi(url, api, cases.WRITE_A_FILE)
    assert written.strip() == cases.FILE, why
    assert cases.WRITTEN in said, why


KINDS = {"chat": "openai-completions", "responses": "openai-responses"}
TRIED = {"stream": stream, "tools": tools}


def of(api, what):
    return case(api, what)(lambda url: TRIED[what](url, KINDS[api]))


globals().update({f"{api}_{what}": of(api, what) for api in KINDS for what in TRIED})

if __name__ == "__main__":
    cases.main(globals())
