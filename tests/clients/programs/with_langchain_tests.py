"""LangChain's standard tests of a chat model, all of them, by both APIs."""

import os

import pytest
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


class Told:
    """Collects what failed."""

    def __init__(self):
        self.failed, self.passed = [], 0

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(
                f"{report.nodeid.rpartition('::')[2]} ({report.longrepr.reprcrash.message[:120]})"
            )
        elif report.when == "call" and report.passed:
            self.passed += 1


def run(url, name):
    os.environ["STANDARD_URL"] = url
    told = Told()
    pytest.main([f"{__file__}::{name}", "-q", "-p", "no:cacheprovider", "-c", os.devnull], plugins=[told])
    assert told.passed, "no test ran"
    assert not told.failed, (
        f"{len(told.failed)} of {told.passed + len(told.failed)}: {'; '.join(told.failed)}"
    )


@case("chat", "standard tests")
def chat(url):
    run(url, "TestChat")


@case("responses", "standard tests")
def responses(url):
    run(url, "TestResponses")


if __name__ == "__main__":
    cases.main(globals())
