"""Clients that leave, at any moment: the engine is rid of their work, and nothing of them stays."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from dragoman.engines.default_weights import default_model
from dragoman.engines.local import LocalEngine, LocalOptions
from dragoman.errors import ModelFileError
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.attacks.bodies import GENERATING, SOCKET, VECTORS, good
from tests.attacks.frame import attacked
from tests.mcp.support import RawServer, raw_server
from tests.support.engines import RUNNER
from tests.support.parrot import call, parrot
from tests.support.stuck import Stuck
from tests.support.wait import becomes
from tests.support.wire import request
from tests.torture.aborts import Storm, settled

OPTIONS = LocalOptions(runner=RUNNER, slots=1, context=2048, threads=1)
CHAT, RESPONSES, COMPACT = "/v1/chat/completions", "/v1/responses", "/v1/responses/compact"
METHODS = {"asked what it has": "tools/list", "called": "tools/call"}


def test_nothing_is_left_of_clients_that_leave_anywhere() -> None:
    """A small one of `python -m tests.torture aborts`."""
    with attacked(interval=0.001) as server:
        storm = Storm(server.url, seed=5)
        asyncio.run(storm.streams(30))
        _, before = settled(server, server.state())
        asyncio.run(storm.streams(120))
        asyncio.run(storm.wholes(40))
        _, after = settled(server, before)
    assert after.live == 0
    assert after.tasks <= before.tasks
    assert after.descriptors <= before.descriptors


@pytest.fixture(scope="module")
def stuck() -> Iterator[tuple[Stuck, str]]:
    engine = Stuck()
    with background(engine, Settings(port=0, store="memory", shutdown_grace=0)) as url:
        yield engine, url


def nobody_is_served(url: str) -> bool:
    """But the one who asks."""
    return "dragoman_requests_in_flight 1.0" in httpx.get(f"{url}/metrics").text


def recorded(url: str) -> float:
    """Chats that are over."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    mark = f'dragoman_requests_total{{route="{CHAT}"'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(mark))


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    position = urlsplit(url)
    with socket.create_connection((position.hostname or "", position.port or 0)) as client:
        yield client


@pytest.mark.parametrize("path", [*(path for path in GENERATING if path != SOCKET), COMPACT, *VECTORS])
def test_leaving_while_the_engine_is_at_work(stuck: tuple[Stuck, str], path: str) -> None:
    engine, url = stuck
    with connected(url) as client:
        client.sendall(request(url, path, good(path)))
        assert becomes(lambda: engine.busy == 1)
    assert becomes(lambda: engine.busy == 0 and nobody_is_served(url))


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"x": "y" * 40_000}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
    ],
    ids=["rendering", "compiling"],
)
def test_leaving_before_the_engine_has_anything(stuck: tuple[Stuck, str], fields: dict[str, Any]) -> None:
    engine, url = stuck
    before = recorded(url)
    with connected(url) as client:
        client.sendall(request(url, CHAT, {**good(CHAT), **fields}))
    assert becomes(lambda: recorded(url) == before + 1)
    assert engine.busy == 0


def test_leaving_in_the_middle_of_a_body(stuck: tuple[Stuck, str]) -> None:
    _, url = stuck
    with connected(url) as client:
        client.sendall(request(url, CHAT, good(CHAT))[:-5])
        assert becomes(lambda: not nobody_is_served(url))
    assert becomes(lambda: nobody_is_served(url))


@pytest.fixture
def tools() -> Iterator[RawServer]:
    with raw_server() as server:
        yield server
        server.released.set()


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", METHODS)
def test_leaving_while_a_tool_server_is(
    tools: RawServer, tmp_path: Path, path: str, stream: bool, when: str
) -> None:
    reached, answer = threading.Event(), tools.answer

    def hang(handler: Any, message: dict[str, Any]) -> None:
        if message["method"] == METHODS[when]:
            reached.set()
            tools.released.wait()
        answer(handler, message)

    tools.answer = hang  # type: ignore[method-assign]
    config = tmp_path / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"raw": {"url": tools.url}}}))
    tool = {"type": "mcp", "server_label": "raw", "require_approval": "never"}
    text = call("say")
    asked: dict[str, Any] = {"input": text}
    if path == CHAT:
        asked = {"messages": [{"role": "user", "content": text}]}
    settings = Settings(port=0, store="memory", mcp_config=str(config), mcp_timeout=600, shutdown_grace=0)
    with background(parrot(), settings) as url:
        with connected(url) as client:
            client.sendall(request(url, path, {**asked, "tools": [tool], "stream": stream}))
            assert reached.wait(timeout=120)
        assert becomes(lambda: nobody_is_served(url))


def test_leaving_the_embedded_model() -> None:
    try:
        engine = LocalEngine.open(default_model(), OPTIONS)
    except ModelFileError as error:
        pytest.skip(f"The default weights cannot be fetched: {error}")
    body = {**good(CHAT), "max_tokens": 2000, "ignore_eos": True}
    with background(engine, Settings(port=0, store="none", shutdown_grace=0)) as url:
        with connected(url) as client:
            client.sendall(request(url, CHAT, body))
            assert becomes(lambda: engine._worker._scheduler.busy)
        assert becomes(lambda: not engine._worker._scheduler.busy)
        assert httpx.post(url + CHAT, json=good(CHAT), timeout=120).status_code == 200
