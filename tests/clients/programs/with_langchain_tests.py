"""LangChain's standard tests of a chat model, all of them, by both APIs."""

import os
import subprocess
import sys

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.clients import cases
from tests.clients.cases import MODEL, case


class Standard(ChatModelIntegrationTests):
    responses = False

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {
            "model": MODEL,
            "base_url": os.environ["STANDARD_URL"],
            "api_key": "none",
            "max_retries": 0,
            "stream_usage": True,
            "use_responses_api": self.responses,
        }

    @property
    def supports_json_mode(self):
        return True

    @property
    def supports_image_inputs(self):
        return False


class TestChat(Standard):
    pass


class TestResponses(Standard):
    responses = True


SETTINGS = ("addopts=", "asyncio_mode=auto", "asyncio_default_test_loop_scope=session")
"""The client keeps its connections, so all tests have to have one loop. And a process of their own."""


def run(url, name):
    options = ["-q", "--noconftest", "--tb=line", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", f"{__file__}::{name}", *options]
    command += [f"--override-ini={one}" for one in SETTINGS]
    environment = {**os.environ, "STANDARD_URL": url}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    print(done.stdout)
    failed = [line.rpartition("::")[2] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert not failed, f"{len(failed)} failed: {'; '.join(failed)}"
    assert done.returncode == 0, done.stdout[-300:]


@case("chat", "standard tests")
def chat(url):
    run(url, "TestChat")


@case("responses", "standard tests")
def responses(url):
    run(url, "TestResponses")


if __name__ == "__main__":
    cases.main(globals())
