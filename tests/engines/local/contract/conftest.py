"""Every test of this folder is run over each runner: three real ones and three that are scripted.

The one over PyTorch has a tiny model with random weights, and is there where PyTorch is: `make torch`.
"""

from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.engines.local import LocalEngine
from tests.engines.local.conftest import OPTIONS, RUNNERS, open_over
from tests.engines.local.contract.subject import Known, Subject
from tests.engines.local.paged import FakePagedRunner, FlyingRunner
from tests.engines.local.scripted import engine_over
from tests.engines.local.support import FakeRunner

PAGE = 16
SIZES: dict[str, Any] = {"slots": 4, "context": 256, "rows": 128}
TORCH = ("torch",) if find_spec("torch") else ()
ALL = ("slots", "pages", "flights", *RUNNERS, *TORCH)


@pytest.fixture(scope="session")
def slots_engine() -> LocalEngine:
    return engine_over(FakeRunner(**SIZES, swaps=True), OPTIONS)


@pytest.fixture(scope="session")
def pages_engine() -> LocalEngine:
    return engine_over(FakePagedRunner(**SIZES, pages=64, page=PAGE, pass_rows=16), OPTIONS)


@pytest.fixture(scope="session")
def flights_engine() -> LocalEngine:
    return engine_over(FlyingRunner(**SIZES, pages=64, page=PAGE), OPTIONS)


@pytest.fixture(scope="session")
def torch_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engines.local.pytorch.models import make

    folder = tmp_path_factory.mktemp("torch")
    make(folder)
    return folder


def open_torch_model(folder: Path) -> LocalEngine:
    return LocalEngine.open(folder, msgspec.structs.replace(OPTIONS, runner="torch"))


@pytest.fixture(scope="session")
def torch_engine(torch_model: Path) -> Iterator[LocalEngine]:
    with closing(open_torch_model(torch_model)) as engine:
        yield engine


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
    scripted = {"slots": FakeRunner, "pages": FakePagedRunner, "flights": FlyingRunner}
    if request.param in scripted:
        engine = engine_over(scripted[request.param](**SIZES), OPTIONS)
    elif request.param == "torch":
        engine = open_torch_model(request.getfixturevalue("torch_model"))
    else:
        engine = open_over(request.getfixturevalue("weights"), request.param)
    return Subject(engine, "", {})
