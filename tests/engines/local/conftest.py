"""The real model, loaded once by each runner; one thread, because tests share the machine with others."""

from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.options import RunnerName
from dragoman.errors import ModelFileError

OPTIONS = LocalOptions(slots=4, context=256, batch=128, chunk=32, threads=1)
RUNNERS = ("llamacpp", "openvino")


@pytest.fixture(scope="session")
def weights() -> Path:
    try:
        return default_model()
    except ModelFileError as error:
        pytest.skip(f"THE DEFAULT WEIGHTS CANNOT BE FETCHED, so nothing of the real model is tested: {error}")


def open_over(weights: Path, runner: RunnerName) -> LocalEngine:
    if runner == "openvino" and find_spec("openvino") is None:
        pytest.skip("OPENVINO IS NOT INSTALLED, so nothing of its runner is tested")
    return LocalEngine.open(weights, msgspec.structs.replace(OPTIONS, runner=runner))


@pytest.fixture(scope="session")
def llamacpp_engine(weights: Path) -> Iterator[LocalEngine]:
    with closing(open_over(weights, "llamacpp")) as engine:
        yield engine


@pytest.fixture(scope="session")
def openvino_engine(weights: Path) -> Iterator[LocalEngine]:
    with closing(open_over(weights, "openvino")) as engine:
        yield engine


@pytest.fixture(scope="session", params=RUNNERS)
def local_engine(request: pytest.FixtureRequest) -> LocalEngine:
    engine: LocalEngine = request.getfixturevalue(f"{request.param}_engine")
    return engine
