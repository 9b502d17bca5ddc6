from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.ray.cluster import running
from tests.store.postgres import running as running_postgres
from tests.support.wait import becomes

ENGINE = "tests.ray.engine:make"


@pytest.fixture(scope="session")
def args() -> Iterator[dict[str, Any]]:
    """Two models: one with two replicas, one that grows when it has more than it can do."""
    with running_postgres() as url:
        one = {"name": "one", "engine": ENGINE, "replicas": 2, "cpus": 0.01}
        scale = {"min": 1, "max": 2, "target": 2, "up_delay_s": 0.5, "down_delay_s": 600}
        two = {"name": "two", "engine": ENGINE, "autoscaling": scale, "cpus": 0.01}
        settings = {"insecure": True, "store": url, "log_level": "warning"}
        yield {"settings": settings, "models": [one, two]}


@pytest.fixture(scope="session")
def fleet(args: dict[str, Any]) -> Iterator[httpx.Client]:
    with running.cluster():
        running.deploy(args)
        with running.client() as client:
            assert becomes(lambda: client.get("/ready").status_code == 200)
            yield client
