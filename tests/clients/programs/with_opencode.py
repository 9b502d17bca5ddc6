"""opencode, the coding agent."""

import json
import tempfile
from pathlib import Path

from tests.clients import cases, coding
from tests.clients.cases import MODEL, case


def opencode(url):
    config = {
        **json.loads(coding.from_page("opencode", "json", url)),
        "autoupdate": False,
        "share": "disabled",
        "permission": {"bash": "allow", "edit": "allow"},
    }

    def ask(text):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "opencode.json").write_text(json.dumps(config))
            return coding.run("opencode", "run", "-m", f"dragoman/{MODEL}", text, folder=folder)

    return ask


@case("chat", "stream")
def stream(url):
    coding.stream(opencode(url))


@case("chat", "tools")
def tools(url):
    coding.tools(opencode(url))


if __name__ == "__main__":
    cases.main(globals())
