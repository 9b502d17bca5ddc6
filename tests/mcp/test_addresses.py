"""Hosts that nobody has named may not be of a private network, whatever they are called."""

import socket
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.errors import BadRequest
from dragoman.mcp import McpServers, McpServerSpec
from dragoman.outbound import is_public, literal_address
from tests.mcp.support import RawServer, failure_of, with_session

PUBLIC = ["8.8.8.8", "[2606:4700::1111]", "[64:ff9b::808:808]", "134744072"]
PRIVATE = ["127.0.0.1", "[::1]", "[::ffff:10.0.0.1]", "2130706433", "0x7f.1", "0177.0.0.1", "127.1", "0",
           "169.254.169.254", "100.64.0.1", "[fe80::1]", "[fd00::1]", "[64:ff9b::a00:1]", "[2002:a00:1::]",
           "224.0.0.1", "255.255.255.255", "[::]"]  # fmt: skip


@pytest.mark.parametrize("host", PUBLIC)
def test_a_star_allows_a_public_address(host: str) -> None:
    assert McpServers(allow=["*"]).resolve("any", f"http://{host}:81/").only_public


@pytest.mark.parametrize("host", PRIVATE)
def test_a_star_allows_no_other(host: str) -> None:
    with pytest.raises(BadRequest, match="mcp_allow") as caught:
        McpServers(allow=["*"]).resolve("any", f"http://{host}:81/")
    assert caught.value.code == "mcp_server_not_allowed"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "10.0.0.1"])
def test_who_names_it_means_it(host: str) -> None:
    servers = McpServers(allow=["*", f"{host}:81"])
    assert not servers.resolve("any", f"http://{host}:81/").only_public


@given(st.ip_addresses(v=4))
def test_no_way_to_write_an_address_changes_what_it_is(address: object) -> None:
    number = int(ip_address(str(address)))
    first, rest = divmod(number, 2**24)
    ways = [str(address), str(number), hex(number), f"0{number:o}", f"{first}.{rest}", f"[::ffff:{address}]"]
    items = [literal_address(way) for way in ways]
    assert {None if one is None else is_public(one) for one in items} == {is_public(ip_address(number))}


def test_a_name_of_a_private_address_is_not_connected_to(raw: RawServer) -> None:
    url = raw.url.replace("127.0.0.1", "localhost")
    spec = McpServerSpec(label="raw", url=url, only_public=True)
    failure = with_session(spec, lambda session: failure_of(session.list_tools()))
    assert failure.kind == "unreachable"
    assert raw.asked == []


def test_one_private_address_among_others_is_one_too_many(
    raw: RawServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 80)) for host in ("8.8.8.8", "127.0.0.1")]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: rows)
    spec = McpServerSpec(label="raw", url="http://both.example/mcp", only_public=True)
    failure = with_session(spec, lambda session: failure_of(session.list_tools()))
    assert failure.kind == "unreachable"


def test_what_was_looked_at_is_what_is_connected_to(raw: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is looked up once, so it cannot stand for something else a moment later."""

    async def looked_up(host: str, port: int) -> str:
        assert host == "tools.example"
        return "127.0.0.1"

    monkeypatch.setattr("dragoman.mcp.transports.public_address", looked_up)
    url = raw.url.replace("127.0.0.1", "tools.example")
    spec = McpServerSpec(label="raw", url=url, only_public=True)
    assert with_session(spec, lambda session: session.call("say", {})).text == "say was called"
    assert {heard["host"].partition(":")[0] for heard in raw.headers} == {"tools.example"}
