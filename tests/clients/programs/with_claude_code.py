"""Claude Code, the coding agent."""

import re
import tempfile
from pathlib import Path

from tests.clients import cases, coding
from tests.clients.cases import case

WORDS = ("--print", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions")


class Session:
    """A home and a folder to work in: what follows another question goes on with its conversation."""

    def __init__(self, url, home):
        self._url, self._home, self._asked = url, home, False
        self._work = Path(home, "work")
        self._work.mkdir()

    def ask(self, text):
        go_on = ("--continue",) if self._asked else ()
        self._asked = True
        return coding.run(
            "claude",
            *WORDS,
            *go_on,
            text,
            folder=str(self._work),
            HOME=self._home,
            **coding.variables_from_page("claude_code", self._url),
            IS_SANDBOX="1",  # Root may skip what it would be asked.
        )


def claude(url):
    def ask(text):
        with tempfile.TemporaryDirectory() as home:
            return Session(url, home).ask(text)

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


@case("messages", "/context")
def context(url):
    """It has what it would send counted, in many requests at once."""
    done = claude(url)("/context")
    assert re.search(r"System tools \| [1-9]", done.said), done.why


@case("messages", "/compact")
def compact(url):
    with tempfile.TemporaryDirectory() as home:
        session = Session(url, home)
        for text in (*[cases.NAME_A_COLOUR] * 3, "/compact", cases.WRITE_A_FILE):
            done = session.ask(text)
        assert done.written.strip() == cases.FILE, done.why


if __name__ == "__main__":
    cases.main(globals())
