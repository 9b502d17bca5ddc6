"""cline, the coding agent, by its command."""

import tempfile
from pathlib import Path

from tests.clients import cases, coding
from tests.clients.cases import MODEL, case


def cline(url):
    def ask(text):
        with tempfile.TemporaryDirectory() as folder:
            home = str(Path(folder, "home"))
            work = Path(folder, "work")
            work.mkdir()

            def run(*words):
                return coding.run("cline", *words, folder=str(work), HOME=home, CLINE_DIR=f"{home}/.cline")

            run("auth", "openai-compatible", "--apikey", "none", "--modelid", MODEL, "--baseurl", url)
            try:
                return run("--json", text)
            finally:
                # It leaves a server of its own behind.
                run("hub", "stop")

    return ask


@case("chat", "stream")
def stream(url):
    coding.stream(cline(url))


@case("chat", "tools")
def tools(url):
    coding.tools(cline(url))


@case("chat", "reasoning")
def reasoning(url):
    coding.reasoning(cline(url))


if __name__ == "__main__":
    cases.main(globals())
