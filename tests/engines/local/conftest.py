"""The real model, loaded once; one thread, because tests share the machine with whatever else runs."""

from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="session")
def local_engine(weights: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine.open(weights, OPTIONS)
    yield engine
    engine.close()
