"""Every turn is planned once, and every prompt rendered once, whatever comes before it."""

from collections.abc import Iterator
from typing import Any

import pytest

from dragoman.http.server import background
from dragoman.prompt import PromptBuilder
from dragoman.settings import Settings
from dragoman.turns.plan import Planner
from tests.http.conftest import RunningServer
from tests.mcp.support import sdk_server
from tests.support.parrot import call, parrot
from tests.support.responses import created

ADD = call("add", a=1, b=2)
THRESHOLD = [{"type": "compaction", "compact_threshold": 1000}]


@pytest.fixture(scope="module")
def tools() -> Iterator[list[dict[str, Any]]]:
    with sdk_server("http") as url:
        label = {"type": "mcp", "server_label": "sums", "server_url": url}
        yield [{**label, "require_approval": "never"}]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often turns were planned and prompts rendered."""
    counts = {"plan": 0, "render": 0}

    def count(kind: type, name: str) -> None:
        was = getattr(kind, name)

        def counting(self: Any, *given: Any, **named: Any) -> Any:
            counts[name] += 1
            return was(self, *given, **named)

        monkeypatch.setattr(kind, name, counting)

    count(Planner, "plan")
    count(PromptBuilder, "render")
    return counts


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    engine = parrot()
    with background(engine, Settings(port=0, store="memory", mcp_allow=["127.0.0.1:*"])) as url:
        yield RunningServer(engine, url)


def test_a_response_with_a_call_is_planned_once_a_turn(
    served: RunningServer, tools: list[dict[str, Any]], counted: dict[str, int]
) -> None:
    created(served.url, ADD, tools=tools)
    assert counted["plan"] == 2


def test_a_list_that_is_known_is_planned_with(
    served: RunningServer, tools: list[dict[str, Any]], counted: dict[str, int]
) -> None:
    first = created(served.url, "hi", tools=tools)
    created(served.url, "on", tools=tools, previous_response_id=first["id"])
    assert counted["plan"] == 2


def test_what_is_short_enough_is_planned_once(served: RunningServer, counted: dict[str, int]) -> None:
    created(served.url, "hi", context_management=THRESHOLD)
    assert counted == {"plan": 1, "render": 1}
