"""opencode, the coding agent."""

import json
import tempfile
from pathlib import Path

from tests.clients import cases, coding
from tests.clients.cases import MODEL, case

PROVIDER = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "local",
    "models": {MODEL: {"name": MODEL, "tool_call": True, "reasoning": True}},
}


def opencode(url):
    config = {
        "provider": {"local": {**PROVIDER, "options": {"baseURL": url, "apiKey": "none"}}},
        "autoupdate": False,
        "share": "disabled",
        "permission": {"bash": "allow", "edit": "allow"},
    }

    def ask(text):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "opencode.json").write_text(json.dumps(config))
            return coding.run("opencode", "run", "-m", f"local/{MODEL}", text, folder=folder)

    return ask


@case("chat", "stream")
def stream(url):
    coding.stream(opencode(url))


@case("chat", "tools")
def tools(url):
    coding.tools(opencode(url))


if __name__ == "__main__":
    cases.main(globals())
