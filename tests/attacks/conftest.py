from collections.abc import Callable, Iterator

import pytest

from tests.attacks.bodies import GOOD, OVER, good
from tests.attacks.doors import FRIEND, KEY, OTHER_KEY
from tests.attacks.frame import MEMORY_MB, AttackedServer, Frame, attacked, healthy

WARM_UP = 3
"""Rounds over all routes, after which what is made once has been made."""


@pytest.fixture(scope="session")
def shared_server() -> Iterator[AttackedServer]:
    """One for all attacks that a server is to survive as it is."""
    with attacked() as attacked_server:
        for _ in range(WARM_UP):
            for route in GOOD:
                reply = attacked_server.send(route, good(route))
                assert reply.status == 200 or route in OVER, (route, reply)
            # What is kept for the next big one is no leak: it is there for all that come.
            attacked_server.send(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 50_000}
            )
        yield attacked_server


@pytest.fixture(scope="module")
def server(
    shared_server: AttackedServer,
    request: pytest.FixtureRequest,
    record_testsuite_property: Callable[[str, object], None],
) -> Iterator[AttackedServer]:
    """Health is asked for all the while; at the end of the file the memory is what it was.

    A file whose attacks may fill a bounded cache says how much as `MEMORY_MB`.
    """
    most = getattr(request.module, "MEMORY_MB", MEMORY_MB)
    before = shared_server.state()
    with healthy(shared_server):
        yield shared_server
    after = shared_server.state()
    record_testsuite_property(f"{request.module.__name__} loop lag p99 ms", round(after.lag_p99_ms, 2))
    record_testsuite_property(f"{request.module.__name__} loop lag max ms", round(after.lag_max_ms, 2))
    assert (after.memory - before.memory) / 2**20 < most, (before, after)


@pytest.fixture
def frame(server: AttackedServer) -> Iterator[Frame]:
    result = Frame(server)
    yield result
    result.over()


@pytest.fixture(scope="module")
def keyed() -> Iterator[AttackedServer]:
    """With keys, and one page that may ask."""
    with attacked(api_key=[KEY, OTHER_KEY], cors_origin=[FRIEND]) as server:
        yield server


@pytest.fixture(scope="module")
def sociable() -> Iterator[AttackedServer]:
    """With a second name, and for all pages."""
    with attacked(allow_host=["my.example"], cors_origin=["*"]) as server:
        yield server
