"""Every test of this folder is run over each runner: two real ones and two that are scripted."""

import pytest

from dragoman.engines.local import LocalEngine
from tests.engines.local.conftest import OPTIONS, RUNNERS
from tests.engines.local.contract.subject import Known, Subject
from tests.engines.local.paged import FakePagedRunner
from tests.engines.local.scripted import engine_over
from tests.engines.local.support import FakeRunner

PAGE = 16


@pytest.fixture(scope="session")
def slots_engine() -> LocalEngine:
    slots, context, batch = OPTIONS.slots or 0, OPTIONS.context or 0, OPTIONS.batch
    return engine_over(FakeRunner(slots=slots, context=context, rows=batch, swaps=True), OPTIONS)


@pytest.fixture(scope="session")
def pages_engine() -> LocalEngine:
    slots, context, batch = OPTIONS.slots or 0, OPTIONS.context or 0, OPTIONS.batch
    pages = slots * context // PAGE
    runner = FakePagedRunner(slots=slots, context=context, rows=batch, pages=pages, page=PAGE, pass_rows=16)
    return engine_over(runner, OPTIONS)


@pytest.fixture(scope="session")
def known() -> Known:
    """Answers of each engine, which are asked for once."""
    return {}


@pytest.fixture(params=["slots", "pages", *RUNNERS])
def subject(request: pytest.FixtureRequest, known: Known) -> Subject:
    engine: LocalEngine = request.getfixturevalue(f"{request.param}_engine")
    return Subject(engine, salt=request.node.name, known=known)
