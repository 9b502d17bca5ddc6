"""Where a server listens, and how it is known behind a proxy."""

import asyncio
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.client import AsyncClient, Client
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.errors import SettingsError
from dragoman.http.keys import ForwardedHeaders, is_open, is_private
from dragoman.http.listeners import bind, bind_unix
from dragoman.http.server import background
from dragoman.settings import Settings, load
from tests.http.conftest import Serve
from tests.support.http import HELLO, get, post
from tests.support.laws import examples

CHAT = "/v1/chat/completions"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "d.sock")


# Unix sockets


def test_a_unix_socket_is_for_its_owner_and_goes_with_the_server(path: str) -> None:
    with background(ScriptedEngine(say("hello")), Settings(uds=path, store="memory")) as url:
        assert url == f"unix:{path}"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with Client(url) as client:
            assert [model["id"] for model in client.models()] == ["scripted"]
            assert client.chat([{"role": "user", "content": "hi"}]).answer().text == "hello"
        with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as plain:
            # Nobody in a browser reaches it, so any name will do.
            assert plain.post(f"http://llm.example{CHAT}", json=HELLO).status_code == 200
    assert not os.path.exists(path)


def test_the_client_for_event_loops_reaches_it_too(path: str) -> None:
    async def look(url: str) -> int:
        async with AsyncClient(url) as client:
            return len(await client.models())

    with background(ScriptedEngine(say("hello")), Settings(uds=path, store="memory", uds_mode="660")) as url:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
        assert asyncio.run(look(url)) == 1


def test_a_socket_that_was_left_behind_is_replaced(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(path)
    with (
        background(ScriptedEngine(say("hello")), Settings(uds=path, store="memory")) as url,
        Client(url) as client,
    ):
        assert client.models()


def test_the_socket_of_another_server_is_not(path: str) -> None:
    with bind_unix(path, 0o600) as first:
        first.listen()
        with pytest.raises(SettingsError, match="Another server"):
            bind_unix(path, 0o600)
    Path(path).unlink()
    Path(path).write_text("mine")
    with pytest.raises(SettingsError, match="not a socket"):
        bind_unix(path, 0o600)
    assert Path(path).read_text() == "mine"
    with pytest.raises(SettingsError, match="Cannot listen"):
        bind_unix(path + "x" * 200, 0o600)


def test_another_one_that_has_taken_the_name_keeps_it(path: str) -> None:
    with background(ScriptedEngine(say("hello")), Settings(uds=path, store="memory")):
        os.unlink(path)
        other = bind_unix(path, 0o600)
    assert os.path.exists(path)
    other.close()


def test_a_unix_socket_is_not_open_to_other_machines(path: str) -> None:
    assert is_open(Settings(host="0.0.0.0"))
    assert not is_open(Settings(host="0.0.0.0", uds=path))


# Addresses


def test_several_servers_share_a_port() -> None:
    with bind("127.0.0.1", 0, reuse_port=True) as one:
        one.listen()
        port = one.getsockname()[1]
        with bind("127.0.0.1", port, reuse_port=True) as two:
            two.listen()
        with pytest.raises(SettingsError, match="Cannot listen"):
            bind("127.0.0.1", port)


def test_several_addresses_have_one_port() -> None:
    settings = Settings(host="127.0.0.1, 127.0.0.2", port=0, store="memory")
    with background(ScriptedEngine(say("hello")), settings) as url:
        for each in (url, url.replace("127.0.0.1", "127.0.0.2")):
            assert get(each, "/health", host="localhost").status_code == 200


def test_one_address_that_others_reach_opens_all() -> None:
    assert is_open(Settings(host="127.0.0.1,0.0.0.0"))
    assert not is_open(Settings(host="127.0.0.1,::1"))


# Behind a proxy


@pytest.mark.parametrize(
    ("settings", "private"),
    [
        ({}, True),
        ({"host": "127.0.0.1,::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"uds": "/x"}, False),
        ({"root_path": "/llm"}, False),
        ({"forwarded_allow_ips": ["127.0.0.1"]}, False),
    ],
)
def test_who_asks_through_a_proxy_is_not_taken_for_somebody_on_this_machine(
    settings: dict[str, Any], private: bool
) -> None:
    """Without any key, those on this machine may load and unload models; others may not."""
    assert is_private(Settings(**settings)) is private


@pytest.fixture(scope="module")
def rooted() -> Iterator[str]:
    settings = Settings(port=0, store="memory", root_path="/llm", api_key=["k"])
    with background(ScriptedEngine(say("hello")), settings) as url:
        yield url


@pytest.mark.parametrize("root", ["", "/llm"])
def test_a_proxy_may_take_its_part_off_the_path_or_not(rooted: str, root: str) -> None:
    assert post(rooted, f"{root}{CHAT}", HELLO, **{"x-api-key": "k"}).status_code == 200
    assert get(rooted, f"{root}/health").status_code == 200
    assert get(rooted, f"{root}/v1/models").status_code == 401
    assert post(rooted, f"{root}/v1/messages", {}).json()["type"] == "error"


@pytest.mark.parametrize(
    "path", ["/%6clm/health", "/llmhealth", "/llm/llm/health", "//llm/health", "/llm%2Fhealth", "/LLM/health"]
)
def test_no_other_way_to_write_it_is_open(rooted: str, path: str) -> None:
    assert get(rooted, path).status_code == 401


def test_its_description_says_where_it_is(rooted: str) -> None:
    assert get(rooted, "/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_the_page_is_there_too(rooted: str) -> None:
    reply = get(rooted, "/llm/")
    assert reply.status_code == 200
    assert 'href="/' not in reply.text and 'src="/' not in reply.text


@pytest.mark.parametrize("root", ["llm", "/llm/", "/a b", "/<x>", "//"])
def test_what_is_no_path_is_refused(root: str) -> None:
    with pytest.raises(SettingsError, match="root_path"):
        load({"root_path": root}, environ={})


def applied(trusted: list[str], peer: str | None, *headers: tuple[str, str]) -> tuple[Any, Any]:
    scope: dict[str, Any] = {
        "type": "http",
        "scheme": "http",
        "client": None if peer is None else (peer, 1234),
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }
    ForwardedHeaders(Settings(forwarded_allow_ips=trusted)).apply(scope)
    return scope["client"] and scope["client"][0], scope["scheme"]


FOR, PROTO = "x-forwarded-for", "x-forwarded-proto"


@pytest.mark.parametrize(
    ("trusted", "peer", "headers", "client"),
    [
        (["10.0.0.1"], "10.0.0.1", [(FOR, "1.2.3.4")], "1.2.3.4"),
        (["10.0.0.1"], "10.0.0.2", [(FOR, "1.2.3.4")], "10.0.0.2"),
        (["10.0.0.0/8"], "10.9.9.9", [(FOR, "6.6.6.6, 1.2.3.4, 10.0.0.3")], "1.2.3.4"),
        (["10.0.0.0/8"], "10.9.9.9", [(FOR, "1.2.3.4:5678")], "1.2.3.4"),
        (["10.0.0.0/8"], "10.9.9.9", [(FOR, "[2001:db8::1]:5678")], "2001:db8::1"),
        (["10.0.0.0/8"], "10.9.9.9", [(FOR, "nonsense, 10.0.0.3")], "10.0.0.3"),
        (["10.0.0.0/8"], "10.9.9.9", [(FOR, "<script>")], "10.9.9.9"),
        (["10.0.0.0/8"], "::ffff:10.0.0.1", [(FOR, "1.2.3.4")], "1.2.3.4"),
        (["*"], "9.9.9.9", [(FOR, "1.2.3.4, 5.6.7.8")], "1.2.3.4"),
        (["10.0.0.1"], None, [(FOR, "1.2.3.4")], "1.2.3.4"),
        (
            ["10.0.0.1"],
            "10.0.0.1",
            [("forwarded", 'for=1.2.3.4;proto=https, for="[2001:db8::2]"')],
            "2001:db8::2",
        ),
        (["10.0.0.1"], "10.0.0.1", [("forwarded", "by=x"), (FOR, "1.2.3.4")], "10.0.0.1"),
    ],
)
def test_whom_a_proxy_asks_for(
    trusted: list[str], peer: str | None, headers: list[tuple[str, str]], client: str
) -> None:
    assert applied(trusted, peer, *headers)[0] == client


def test_the_scheme_is_that_of_the_proxy() -> None:
    assert applied(["10.0.0.1"], "10.0.0.1", (FOR, "1.2.3.4"), (PROTO, "https"))[1] == "https"
    assert applied(["10.0.0.1"], "10.0.0.2", (FOR, "1.2.3.4"), (PROTO, "https"))[1] == "http"
    assert applied(["10.0.0.1"], "10.0.0.1", ("forwarded", "for=1.2.3.4;proto=https"))[1] == "https"
    assert applied(["10.0.0.1"], "10.0.0.1", (PROTO, "javascript"))[1] == "http"


@examples(200)
@given(st.text(max_size=60), st.text(max_size=60))
def test_whatever_is_said_a_client_is_an_address(one: str, two: str) -> None:
    raw = [("x-forwarded-for", one), ("forwarded", two)]
    headers = [(name, text.encode("utf-8", "replace").decode("latin-1")) for name, text in raw]
    client, scheme = applied(["*"], "10.0.0.1", *headers)
    assert not set(client) - set("0123456789abcdef:.%") or ":" in client
    assert scheme in ("http", "https")


def test_networks_that_are_none_are_refused(serve: Serve) -> None:
    with pytest.raises(SettingsError, match="forwarded_allow_ips"):
        serve(ScriptedEngine(say("hi")), forwarded_allow_ips=["proxy.example"])


def test_the_log_has_the_client_and_not_the_proxy(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    url = serve(ScriptedEngine(say("hi")), forwarded_allow_ips=["127.0.0.1"])
    with caplog.at_level("INFO", "dragoman.access"):
        get(url, "/v1/models", **{FOR: "203.0.113.9"})
        get(url, "/v1/models")
        done = threading.Event()
        done.wait(0.05)
    items = [record.request.get("client") for record in caplog.records if hasattr(record, "request")]
    assert items == ["203.0.113.9", None]
