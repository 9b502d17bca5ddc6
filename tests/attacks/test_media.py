"""Bodies, ids and headers that nobody needs, and what is said to browsers."""

import pytest

from dragoman.http.routes.table import ANY_MEDIA, FORMS, POST
from tests.attacks.bodies import good
from tests.attacks.doors import CHAT, KEY, ask
from tests.attacks.frame import AttackedServer, Frame
from tests.attacks.raw_messages import BODY
from tests.attacks.raw_socket import held


@pytest.mark.parametrize("route", [route for route in POST if route not in FORMS | ANY_MEDIA])
@pytest.mark.parametrize(
    "media",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json", "", "jsonp"],
)
def test_a_form_is_no_request(frame: Frame, route: str, media: str) -> None:
    reply = frame.server.client.post(frame.server.path(route), content=BODY, headers={"content-type": media})
    assert reply.status_code == 415


@pytest.mark.parametrize("route", sorted(ANY_MEDIA))
@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
def test_a_page_has_no_way_in_by_a_form_where_forms_are_read(frame: Frame, route: str, origin: str) -> None:
    how = {"content-type": "text/plain", "origin": origin}
    reply = frame.server.client.post(frame.server.path(route), content=BODY, headers=how)
    assert reply.status_code == 403


@pytest.mark.parametrize("route", [route for route in POST if route not in FORMS])
@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip", "zstd", "x"])
def test_a_compressed_body_is_not_unpacked(frame: Frame, route: str, coding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": coding}
    reply = frame.server.client.post(frame.server.path(route), content=BODY, headers=headers)
    assert reply.status_code == 415


def test_ten_thousand_ranges_are_ignored(frame: Frame) -> None:
    ranges = ",".join(f"{n}-" for n in range(10_000))
    whole = frame.server.client.get("/docs")
    reply = frame.server.client.get("/docs", headers={"range": f"bytes={ranges}"})
    assert (reply.status_code, reply.content) == (200, whole.content)


@pytest.mark.parametrize(
    "id_", ["..%2f..%2fetc%2fpasswd", "%00", "a%00b", "x" * 4096, "%0d%0a", "%27%20OR%201=1", "%ff"]
)
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/responses/", "/v1/conversations/", "/v1/chat/completions/", "/v1/models/"),
        *("/v1/files/", "/v1/batches/"),
    ],
)
def test_an_odd_id_is_unknown(frame: Frame, path: str, id_: str) -> None:
    for method in ("GET", "DELETE"):
        if method == "GET" or path not in ("/v1/models/", "/v1/batches/"):
            assert ask(frame.server, method, path + id_).status_code == 404


# What is said to browsers and of clients


def test_the_page_of_the_docs_fetches_nothing_from_elsewhere(server: AttackedServer) -> None:
    headers = ask(server, "GET", "/docs").headers
    policy = headers["content-security-policy"]
    assert (
        "default-src 'none'" in policy
        and "frame-ancestors 'none'" in policy
        and "script-src 'self'" in policy
    )
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


def test_answers_for_a_key_are_kept_by_nobody(keyed: AttackedServer) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    for body in (good(CHAT), {**good(CHAT), "stream": True}):
        reply = keyed.client.post(CHAT, json=body, headers=headers)
        assert (reply.status_code, reply.headers["cache-control"]) == (200, "no-store")
    assert ask(keyed, "GET", "/v1/models").headers["www-authenticate"] == "Bearer"


def test_nothing_that_clients_send_makes_a_metric(server: AttackedServer) -> None:
    def series() -> set[str]:
        lines = server.client.get("/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")}

    def odd(number: int) -> None:
        server.client.request(["M-SEARCH", "PURGE", "LINK"][number % 3], f"/odd/{number}")
        server.client.post(
            CHAT, json={**good(CHAT), "model": f"odd-{number}"}, headers={"x-request-id": f"{number}"}
        )

    odd(0)
    series()
    before = series()
    for number in range(1, 60):
        odd(number)
    assert series() == before


def test_only_one_port_listens(keyed: AttackedServer) -> None:
    assert len([one for one in held(keyed.process.pid) if one.listens]) == 1
