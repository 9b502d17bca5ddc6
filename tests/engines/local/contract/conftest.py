"""Every test of this folder is run over each runner: two real ones and two that are scripted."""

from typing import Any

import pytest

from dragoman.engines.local import LocalEngine
from tests.engines.local.conftest import OPTIONS, RUNNERS, open_over
from tests.engines.local.contract.subject import Known, Subject
from tests.engines.local.paged import FakePagedRunner
from tests.engines.local.scripted import engine_over
from tests.engines.local.support import FakeRunner

PAGE = 16
SIZES: dict[str, Any] = {"slots": 4, "context": 256, "rows": 128}
ALL = ("slots", "pages", *RUNNERS)


@pytest.fixture(scope="session")
def slots_engine() -> LocalEngine:
    return engine_over(FakeRunner(**SIZES, swaps=True), OPTIONS)


@pytest.fixture(scope="session")
def pages_engine() -> LocalEngine:
    return engine_over(FakePagedRunner(**SIZES, pages=64, page=PAGE, pass_rows=16), OPTIONS)


@pytest.fixture(scope="session")
def known() -> Known:
    """Answers of each engine, which are asked for once."""
    return {}


@pytest.fixture(params=ALL)
def subject(request: pytest.FixtureRequest, known: Known) -> Subject:
    engine: LocalEngine = request.getfixturevalue(f"{request.param}_engine")
    return Subject(engine, request.node.name, known)


@pytest.fixture(params=ALL)
def mortal(request: pytest.FixtureRequest) -> Subject:
    """One that may be stopped, because nobody else uses it."""
    scripted = {"slots": FakeRunner, "pages": FakePagedRunner}
    if request.param in scripted:
        engine = engine_over(scripted[request.param](**SIZES), OPTIONS)
    else:
        engine = open_over(request.getfixturevalue("weights"), request.param)
    return Subject(engine, "", {})
