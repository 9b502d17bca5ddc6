"""A real model behind a real socket, for real clients: once over llama.cpp, once over OpenVINO."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from msgspec import Struct

from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.engines.local.options import RunnerName
from dragoman.http.server import background
from dragoman.settings import Settings

MODEL = "smollm2"
RUNNERS = ("llamacpp", "openvino")
FROM_SCRATCH = {"cache_prompt": False}
"""For answers that are compared: OpenVINO rounds otherwise behind a prefix that it has computed before."""


class RunningServer(Struct):
    engine: LocalEngine
    url: str


def serve(runner: RunnerName) -> Iterator[RunningServer]:
    # One thread, because tests share the machine with whatever else runs.
    options = LocalOptions(runner=runner, name=MODEL, context=1024, slots=8, threads=1)
    engine = LocalEngine.open(default_model(), options)
    with background(engine, Settings(port=0, model_alias=["gpt-4o-mini"])) as url:
        yield RunningServer(engine, url)


@pytest.fixture(scope="session")
def llamacpp() -> Iterator[RunningServer]:
    yield from serve("llamacpp")


@pytest.fixture(scope="session")
def openvino() -> Iterator[RunningServer]:
    if find_spec("openvino") is None:
        pytest.skip("OPENVINO IS NOT INSTALLED, so no client is tested with its runner")
    yield from serve("openvino")


@pytest.fixture(scope="module", params=RUNNERS)
def served(request: pytest.FixtureRequest) -> RunningServer:
    server: RunningServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="module")
def engine(served: RunningServer) -> LocalEngine:
    return served.engine


@pytest.fixture(scope="module")
def base_url(served: RunningServer) -> str:
    return served.url + "/v1"
