"""Continue's command `cn`, the coding agent, by Chat Completions and by Ollama's API."""

import tempfile
from pathlib import Path

from tests.clients import cases, coding
from tests.clients.cases import MODEL, case

CONFIG = """\
name: local
version: 1.0.0
schema: v1
models:
  - name: {model}
    provider: {provider}
    model: {model}
    apiBase: {url}
    apiKey: none
    capabilities: [tool_use]
    roles: [chat]
"""


def cn(url, provider):
    def ask(text):
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "config.yaml")
            config.write_text(CONFIG.format(model=MODEL, url=url, provider=provider))
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
    coding.stream(cn(url.removesuffix("/v1"), "ollama"))


@case("ollama", "tools")
def ollama_tools(url):
    coding.tools(cn(url.removesuffix("/v1"), "ollama"))


if __name__ == "__main__":
    cases.main(globals())
