from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from msgspec import Struct

from dragoman.engines.protocol import Engine
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.support.parrot import parrot as make_parrot

Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(engine, api_key=["k"])` gives the address of a server that ends with the test."""
    with ExitStack() as servers:

        def start(engine: Engine, **settings: object) -> str:
            chosen = Settings(port=0, **settings)  # type: ignore[arg-type]
            return servers.enter_context(background(engine, chosen))

        yield start


@pytest.fixture(scope="session")
def greeter() -> Iterator[str]:
    """The address of a server that says "Hello, wörld!" to everything."""
    with background(ScriptedEngine(say("Hello, wörld!"))) as url:
        yield url


class RunningServer(Struct):
    engine: ScriptedEngine
    url: str


@pytest.fixture(scope="session")
def parrot() -> Iterator[RunningServer]:
    """A server whose model says what the last message says."""
    engine = make_parrot()
    with background(engine, Settings(port=0, store="memory")) as url:
        yield RunningServer(engine, url)
