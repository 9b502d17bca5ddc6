"""A real model behind a real socket, for real clients."""

from collections.abc import Iterator

import pytest

from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.weights import default_model
from dragoman.http.server import background
from dragoman.settings import Settings

MODEL = "smollm2"


@pytest.fixture(scope="session")
def engine() -> LocalEngine:
    # One thread, because tests share the machine with whatever else runs.
    return LocalEngine.open(default_model(), LocalOptions(name=MODEL, context=1024, slots=8, threads=1))


@pytest.fixture(scope="session")
def base_url(engine: LocalEngine) -> Iterator[str]:
    with background(engine, Settings(port=0, model_alias=["gpt-4o-mini"])) as url:
        yield url + "/v1"
