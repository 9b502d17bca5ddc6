"""Claude Code, the coding agent."""

import tempfile
from pathlib import Path

from tests.clients import cases, coding
from tests.clients.cases import MODEL, case

WORDS = ("--print", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions")


def claude(url):
    def ask(text):
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder, "work")
            work.mkdir()
            return coding.run(
                "claude",
                *WORDS,
                text,
                folder=str(work),
                HOME=folder,
                ANTHROPIC_BASE_URL=url.removesuffix("/v1"),
                ANTHROPIC_AUTH_TOKEN="none",
                ANTHROPIC_MODEL=MODEL,
                ANTHROPIC_SMALL_FAST_MODEL=MODEL,
                CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
                IS_SANDBOX="1",  # Root may skip what it would be asked.
            )

    return ask


@case("messages", "stream")
def stream(url):
    coding.stream(claude(url))


@case("messages", "tools")
def tools(url):
    coding.tools(claude(url))


@case("messages", "reasoning")
def reasoning(url):
    coding.reasoning(claude(url))


if __name__ == "__main__":
    cases.main(globals())
