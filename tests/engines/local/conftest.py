"""The real model, loaded once by each runner; one thread, because tests share the machine with others."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.weights import default_model
from dragoman.errors import ModelFileError

OPTIONS = LocalOptions(slots=4, context=512, batch=128, chunk=32, threads=1)


@pytest.fixture(scope="session")
def weights() -> Path:
    try:
        return default_model()
    except ModelFileError as error:
        pytest.skip(f"THE DEFAULT WEIGHTS CANNOT BE FETCHED, so nothing of the real model is tested: {error}")


@pytest.fixture(scope="session", params=["llamacpp", "openvino"])
def local_engine(weights: Path, request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    if request.param == "openvino" and find_spec("openvino") is None:
        pytest.skip("openvino is not installed")
    engine = LocalEngine.open(weights, msgspec.structs.replace(OPTIONS, runner=request.param))
    yield engine
    engine.close()
