"""The names of the server, and the web pages that may ask it."""

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.attacks.bodies import good
from tests.attacks.doors import CHAT, FOREIGN, FRIEND, KEY, ROUTES, ask, filled, name
from tests.attacks.frame import AttackedServer
from tests.attacks.raw_socket import Raw


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "0"]
)
@pytest.mark.parametrize(
    "route", [("GET", "/health"), ("GET", "/v1/models"), ("POST", CHAT), ("OPTIONS", CHAT)], ids=name
)
def test_a_foreign_name_is_refused(server: AttackedServer, route: tuple[str, str], host: str) -> None:
    reply = ask(server, *route, host=f"{host}:8000")
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:8000", "[::1]", "localhost.", "0.0.0.0:8000", "[::]"],
)
def test_the_names_of_the_loopback_are_answered(server: AttackedServer, host: str) -> None:
    assert ask(server, "GET", "/v1/models", host=host).status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/nowhere"])
def test_a_socket_by_a_foreign_name_or_page_is_refused(server: AttackedServer, path: str) -> None:
    url = server.url.replace("http", "ws") + path
    with pytest.raises(InvalidStatus) as refused:
        connect(url, origin=FOREIGN)  # type: ignore[arg-type]
    assert refused.value.response.status_code == 403
    with Raw(server.url) as raw, pytest.raises(InvalidStatus) as refused:
        connect(url.replace("127.0.0.1", "evil.example"), sock=raw.socket)
    assert refused.value.response.status_code == 403


def test_further_names_may_be_allowed(sociable: AttackedServer) -> None:
    assert ask(sociable, "GET", "/health", host="my.example:443").status_code == 200
    assert ask(sociable, "GET", "/health", host="other.example").status_code == 403


# Pages


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
@pytest.mark.parametrize("path", ["/health", "/v1/models", CHAT, "/docs", "/nowhere"])
def test_a_foreign_page_is_refused(server: AttackedServer, method: str, path: str) -> None:
    for origin in (FOREIGN, "null", "http://localhost", "http://localhost.evil.example", "file://"):
        reply = server.client.request(method, path, headers={"origin": origin})
        assert reply.status_code == 403
        assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize("route", ROUTES, ids=name)
def test_a_foreign_page_is_refused_on_every_route(server: AttackedServer, route: tuple[str, str]) -> None:
    method, path = route
    assert ask(server, method, filled(path), origin=FOREIGN).status_code == 403


def test_our_own_page_may_ask(server: AttackedServer) -> None:
    assert ask(server, "GET", "/v1/models", origin=server.url).status_code == 200


def test_a_listed_page_may_ask_with_its_key(keyed: AttackedServer) -> None:
    before = keyed.client.options(
        CHAT,
        headers={
            "origin": FRIEND,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type",
        },
    )
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == FRIEND
    assert before.headers["access-control-allow-headers"] == "authorization, content-type"
    assert "POST" in before.headers["access-control-allow-methods"]
    reply = keyed.client.post(CHAT, json=good(CHAT), headers={"origin": FRIEND, "x-api-key": KEY})
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, FRIEND)
    assert "access-control-allow-credentials" not in reply.headers


def test_a_listed_page_can_read_why_it_was_refused(keyed: AttackedServer) -> None:
    reply = ask(keyed, "GET", "/v1/models", origin=FRIEND)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (401, FRIEND)


def test_what_is_said_to_one_page_is_not_kept_for_another(keyed: AttackedServer) -> None:
    assert ask(keyed, "GET", "/health").headers["vary"] == "Origin"
    assert ask(keyed, "GET", "/health", origin=FRIEND).headers["vary"] == "Origin"
    assert ask(keyed, "GET", "/health", origin=FOREIGN).status_code == 403


def test_all_pages_may_be_let_in(sociable: AttackedServer) -> None:
    reply = ask(sociable, "GET", "/v1/models", origin=FOREIGN)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")
    assert "access-control-allow-credentials" not in reply.headers
