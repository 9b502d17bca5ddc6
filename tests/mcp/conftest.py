from collections.abc import Iterator

import pytest

from dragoman.mcp import McpServerSpec
from tests.mcp.support import RawServer, raw_server, sdk_server


@pytest.fixture
def raw() -> Iterator[RawServer]:
    with raw_server() as server:
        yield server


@pytest.fixture
def raw_spec(raw: RawServer) -> McpServerSpec:
    return McpServerSpec(label="raw", url=raw.url)


@pytest.fixture(scope="session")
def http_url() -> Iterator[str]:
    with sdk_server("http") as url:
        yield url


@pytest.fixture(scope="session")
def sse_url() -> Iterator[str]:
    with sdk_server("sse") as url:
        yield url
