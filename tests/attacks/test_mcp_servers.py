"""MCP servers that burst, crash, echo, leave children and talk nonsense: one call fails, nothing else.

Rows 73 to 77. What each fault is for the client of a server is tested in `tests/mcp`.
"""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.bodies import good
from tests.attacks.canary import canary
from tests.attacks.frame import AttackedServer, attacked, healthy
from tests.mcp.support import SERVERS
from tests.mcp.test_stdio import is_running
from tests.support.parrot import call
from tests.support.wait import becomes

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "burst": ({"messages": 5_000}, "after the burst"),
    "echo": ({}, "after the echo"),
    "strangers": ({}, "after the strangers"),
    "chatter": ({}, "after the chatter"),
    "binary": ({}, "after the noise"),
    "die": ({}, "closed the connection"),
    "endless": ({}, "more than is allowed"),
    "long": ({"chars": 900_000}, "more than is allowed"),
    "shapeless": ({}, "not of the protocol"),
    "refuse": ({}, "-32050"),
}
"""What a tool is asked, and what the model is told."""
TOOL = {"type": "mcp", "server_label": "raw", "require_approval": "never"}
MEMORY_MB = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    names = [*FAULTS, "say", "leave", "link"]
    entry = {"command": sys.executable, "args": [str(SERVERS / "raw.py"), "all", *names]}
    config = tmp_path_factory.mktemp("mcp") / "servers.json"
    config.write_text(json.dumps({"mcpServers": {"raw": entry}}))
    with attacked(mcp_config=str(config), mcp_allow=["127.0.0.1:*"]) as attacked_server:
        asked(attacked_server, CHAT, "say")
        yield attacked_server


def asked(server: AttackedServer, route: str, tool: str, **arguments: Any) -> str:
    """What the model says after its call: what it was told of it."""
    text = call(tool, **arguments)
    body = {"messages": [{"role": "user", "content": text}]} if route == CHAT else {"input": text}
    reply = server.send(route, {**body, "tools": [TOOL]})
    assert reply.status == 200, reply.body[:2000]
    return reply.body.decode()


@pytest.mark.parametrize("route", [CHAT, RESPONSES])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_that_of_one_call(server: AttackedServer, fault: str, route: str) -> None:
    arguments, text = FAULTS[fault]
    before = server.memory()
    with healthy(server):
        assert text in asked(server, route, fault, **arguments)
        assert "say {}" in asked(server, route, "say")
        assert server.send(CHAT, good(CHAT)).status == 200
    assert server.memory() - before < MEMORY_MB * 2**20


def test_children_of_a_server_that_has_left_are_ended(server: AttackedServer) -> None:
    result = json.loads(asked(server, CHAT, "leave"))["choices"][0]["message"]["content"]
    child = int(result.split()[-1])
    assert becomes(lambda: not is_running(child))
    assert "say {}" in asked(server, CHAT, "say")


def test_an_address_that_a_server_names_is_never_opened(server: AttackedServer) -> None:
    with canary() as bird:
        assert "Error" not in asked(server, CHAT, "link", url=bird.url())
        assert not bird.sings


def test_nothing_is_kept_of_servers_that_requests_name(server: AttackedServer) -> None:
    """Every request brings another server, under another name, with another token; none of them is there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

        def one(number: int) -> None:
            url, token = f"http://127.0.0.1:{port}/{number}", f"token-{number}"
            named = {**TOOL, "server_label": f"s{number}", "server_url": url, "authorization": token}
            body = {"input": "hi", "tools": [named], "store": False}
            assert "could not be reached" in server.send(RESPONSES, body).body.decode()

        one(0)
        before = server.state()
        for number in range(1, 60):
            one(number)
        assert becomes(lambda: server.state().tasks <= before.tasks)
        assert server.state().descriptors <= before.descriptors + 1


def test_the_processes_end_with_the_server(tmp_path: Path) -> None:
    entry = {"command": sys.executable, "args": [str(SERVERS / "raw.py"), "all", "say"]}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"raw": entry}}))
    with attacked(mcp_config=str(tmp_path / "servers.json")) as server:
        result = json.loads(asked(server, CHAT, "say"))["choices"][0]["message"]["content"]
    assert becomes(lambda: not is_running(int(result.split()[-1])))
