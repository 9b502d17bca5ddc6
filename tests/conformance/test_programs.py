"""The programs of `make clients` whose packages the environment of the tests has."""

from collections.abc import Iterator
from importlib import import_module

import pytest

from dragoman.http.server import background
from dragoman.settings import Settings
from tests.clients.cases import Case, SeenRequest, cases_of, try_case
from tests.clients.model import model

PROGRAMS = ("with_openai", "with_anthropic", "with_litellm", "with_langchain", "with_openai_agents")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with background(model(), Settings(port=0, store="memory")) as text:
        yield text + "/v1"


def cases(program: str) -> list[Case]:
    # Imported late, because some take seconds and not every process of a run gets to them.
    return cases_of(vars(import_module(f"tests.clients.programs.{program}")))


def failures(tried: list[Case], url: str) -> list[SeenRequest]:
    assert tried
    return [seen for case in tried if (seen := try_case(case, url)).failed is not None]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str, url: str) -> None:
    if program == "with_anthropic":
        pytest.importorskip("anthropic")
    assert failures(cases(program), url) == []


@pytest.mark.parametrize("program", ["with_openai", "with_openai_agents"])
def test_strict_tools_of_an_engine_that_cannot_constrain(program: str) -> None:
    calling = [case for case in cases(program) if case.what in ("tools", "parse() of calls, appended")]
    with background(model(constrains=False), Settings(port=0, store="memory")) as url:
        assert failures(calling, f"{url}/v1") == []
