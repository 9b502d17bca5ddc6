"""The programs of `make clients` whose packages the environment of the tests has."""

from collections.abc import Iterator
from importlib import import_module

import pytest

from dragoman.http.server import background
from dragoman.settings import Settings
from tests.clients.cases import cases_of, try_case
from tests.clients.model import model

PROGRAMS = ("with_openai", "with_litellm", "with_langchain", "with_openai_agents")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with background(model(), Settings(port=0, store="memory")) as made:
        yield made + "/v1"


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str, url: str) -> None:
    # Imported late, because some take seconds and not every process of a run gets to them.
    cases = cases_of(vars(import_module(f"tests.clients.programs.{program}")))
    seen = [try_case(case, url) for case in cases]
    assert seen
    assert [one for one in seen if one.failed is not None] == []
