"""The `llm` command, with a model of ours in its list."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients import cases
from tests.clients.cases import MODEL, case

FUNCTION = 'def weather(city: str) -> str:\n    "How warm it is."\n    return f"21 degrees in {city}"\n'


def llm(url, *words):
    with tempfile.TemporaryDirectory() as home:
        Path(home, "extra-openai-models.yaml").write_text(
            f"- model_id: local\n  model_name: {MODEL}\n  api_base: {url}\n  supports_tools: true\n"
            "  supports_schema: true\n"
        )
        environment = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "none"}
        command = [sys.executable, "-m", "llm", "-m", "local", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-300:]
    return done.stdout.strip()


@case("chat", "plain")
def plain(url):
    assert llm(url, "--no-stream", cases.NAME_A_COLOUR) == cases.COLOUR


@case("chat", "stream")
def stream(url):
    assert llm(url, cases.NAME_A_COLOUR) == cases.COLOUR


@case("chat", "tools")
def tools(url):
    assert llm(url, "--functions", FUNCTION, cases.HOW_WARM).endswith(cases.WARM)


@case("chat", "a schema")
def schema(url):
    assert llm(url, "--schema", "city str", cases.WHICH_CITY) == '{"city": "Paris"}'


if __name__ == "__main__":
    cases.main(globals())
