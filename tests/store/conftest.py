from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from dragoman.store import Store, StoreLimits
from dragoman.store.postgres import PostgresStore
from dragoman.store.sqlite import SqliteStore
from tests.store.postgres import empty, running


class Make(Protocol):
    def __call__(self, bounds: StoreLimits = ..., clock: Callable[[], float] | None = None) -> Store: ...


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    with running() as url:
        yield url


@pytest.fixture
def postgres_url(postgres_server: str) -> str:
    """The address of a database without tables."""
    empty(postgres_server)
    return postgres_server


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes stores of one kind. Those of a file or a database share it."""
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else ""

    def made(bounds: StoreLimits = StoreLimits(), clock: Callable[[], float] | None = None) -> Store:  # noqa: B008
        if url:
            return PostgresStore(url, bounds, clock=clock)
        return SqliteStore(tmp_path if request.param == "sqlite" else None, bounds, clock=clock)

    return made


@pytest.fixture
async def store(make: Make) -> AsyncIterator[Store]:
    result = make()
    await result.open()
    yield result
    await result.close()
