"""Continue's command `cn`, the coding agent, by Chat Completions and by Ollama's API."""

import tempfile
from pathlib import Path

from tests.clients import cases, coding
from tests.clients.cases import case


def cn(url, provider):
    def ask(text):
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "config.yaml")
            text_of = coding.from_page("continue", "yaml", url)
            if provider == "ollama":
                text_of = text_of.replace("provider: openai", "provider: ollama").replace(
                    url, url.removesuffix("/v1")
                )
            config.write_text(text_of)
            words = ["--config", str(config), "--auto", "-p", text]
            return coding.run("cn", *words, folder=folder, CONTINUE_TELEMETRY_ENABLED="0")

    return ask


@case("chat", "stream")
def stream(url):
    coding.stream(cn(url, "openai"))


@case("chat", "tools")
def tools(url):
    coding.tools(cn(url, "openai"))


@case("ollama", "stream")
def ollama_stream(url):
    coding.stream(cn(url, "ollama"))


@case("ollama", "tools")
def ollama_tools(url):
    coding.tools(cn(url, "ollama"))


if __name__ == "__main__":
    cases.main(globals())
