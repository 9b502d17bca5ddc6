"""Qwen Code, the coding agent."""

import tempfile

from tests.clients import cases, coding
from tests.clients.cases import MODEL, case


def qwen(url):
    def ask(text):
        with tempfile.TemporaryDirectory() as folder:
            return coding.run(
                "qwen",
                "--auth-type",
                "openai",
                "--yolo",
                "-p",
                text,
                folder=folder,
                OPENAI_BASE_URL=url,
                OPENAI_API_KEY="none",
                OPENAI_MODEL=MODEL,
                QWEN_TELEMETRY_ENABLED="false",
            )

    return ask


@case("chat", "stream")
def stream(url):
    coding.stream(qwen(url))


@case("chat", "tools")
def tools(url):
    coding.tools(qwen(url))


if __name__ == "__main__":
    cases.main(globals())
