"""pi, the coding agent, by both APIs."""

import json
import tempfile
from pathlib import Path

from tests.clients import cases, coding
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


def pi(url, api):
    provider = {"baseUrl": url, "api": api, "apiKey": "none", "models": [DESCRIBED]}

    def ask(text):
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder, "home", ".pi", "agent")
            home.mkdir(parents=True)
            (home / "models.json").write_text(json.dumps({"providers": {"local": provider}}))
            words = ["--provider", "local", "--model", MODEL, "-p", text]
            return coding.run("pi", *words, folder=folder, HOME=str(Path(folder, "home")))

    return ask


KINDS = {"chat": "openai-completions", "responses": "openai-responses"}
TRIED = {"stream": coding.stream, "tools": coding.tools}


def of(api, what):
    return case(api, what)(lambda url: TRIED[what](pi(url, KINDS[api])))


globals().update({f"{api}_{what}": of(api, what) for api in KINDS for what in TRIED})

if __name__ == "__main__":
    cases.main(globals())
