"""Who gets in: keys, the names of the server, and web pages, over every route there is."""

import hmac
import random
from collections.abc import Callable, Iterator

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from dragoman.http.keys import Keys
from dragoman.http.routes import DELETE, GET, OPEN_PATHS, POST
from tests.attacks.bodies import good
from tests.attacks.frame import Attacked, Frame, Reply, attacked, check
from tests.attacks.raw_messages import BODY
from tests.attacks.raw_socket import Raw, held

KEY = "sk-right-0123456789"
OTHER_KEY = "sk-other-0123456789"
OWN = ("/ready", "/metrics", "/version")
ROUTES = [
    *(
        (method, path)
        for method, table in (("POST", POST), ("GET", GET), ("DELETE", DELETE))
        for path in table
    ),
    *(("GET", path) for path in (*OWN, "/health")),
]
CLOSED = [route for route in ROUTES if route[1] not in OPEN_PATHS]
CHAT = "/v1/chat/completions"
FOREIGN = "https://evil.example"
FRIEND = "https://friend.example"


def filled(path: str) -> str:
    """The path of a route, with ids in it that nothing has."""
    for name in ("{id}", "{item_id}", "{model:path}"):
        path = path.replace(name, "x")
    return path


def name(route: tuple[str, str]) -> str:
    return " ".join(route)


@pytest.fixture(scope="module")
def keyed() -> Iterator[Attacked]:
    """With keys, and one page that may ask."""
    with attacked(api_key=[KEY, OTHER_KEY], cors_origin=[FRIEND]) as server:
        yield server


@pytest.fixture(scope="module")
def sociable() -> Iterator[Attacked]:
    """With a second name, and for all pages."""
    with attacked(allow_host=["my.example"], cors_origin=["*"]) as server:
        yield server


def ask(server: Attacked, method: str, path: str, **headers: str) -> httpx.Response:
    reply = server.client.request(method, path, headers=headers)
    check(Reply(reply.status_code, reply.content))
    return reply


# Keys


def test_health_alone_is_open() -> None:
    """The others ask for a key because they are not on this list, so a new one does too."""
    assert {"/health"} == OPEN_PATHS


@pytest.mark.parametrize("route", CLOSED, ids=name)
def test_without_the_key_no_route_is_open(keyed: Attacked, route: tuple[str, str]) -> None:
    method, path = route
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"x-api-key": ""},
    ):
        assert ask(keyed, method, filled(path), **headers).status_code == 401


@pytest.mark.parametrize("route", CLOSED, ids=name)
def test_no_host_opens_a_route(keyed: Attacked, route: tuple[str, str]) -> None:
    """Others rebuilt the path that they asked the key for from this header."""
    method, path = route
    for host in (b"a/?x=", b"a/#", b"/health?x=", b"localhost/health", b"localhost"):
        with Raw(keyed.url) as raw:
            raw.send(b"%s %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (method.encode(), filled(path).encode(), host))
            assert raw.replies(1)[0].status == (401 if host == b"localhost" else 400)


@pytest.mark.parametrize(
    "path",
    ["/health/", "//health", "/health/../v1/models", "/v1/models;/health", "/v1/models%3f/health", "/HEALTH",
     "/v1/models#/health", "/%68ealth", "/health%00", "/v1/models?/health", "/docs", "/pause"],
)  # fmt: skip
def test_what_looks_like_health_is_closed(keyed: Attacked, path: str) -> None:
    with Raw(keyed.url) as raw:
        raw.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert raw.replies(1)[0].status == 401


def test_any_path_is_closed(keyed: Attacked) -> None:
    chance = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789/._-~%3Fv1"
    for _ in range(300):
        path = "/" + "".join(chance.choices(letters, k=chance.randint(1, 40)))
        method = chance.choice(["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
        assert ask(keyed, method, keyed.url + path).status_code == 401


def test_a_socket_needs_the_key(keyed: Attacked) -> None:
    url = keyed.url.replace("http", "ws") + "/v1/responses"
    with pytest.raises(InvalidStatus) as refused:
        connect(url)
    assert refused.value.response.status_code == 401
    with connect(url, additional_headers={"authorization": f"Bearer {KEY}"}):
        pass


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_either_key_opens_in_either_header(keyed: Attacked, key: str, header: str) -> None:
    given = f"Bearer {key}" if header == "authorization" else key
    assert ask(keyed, "GET", "/v1/models", **{header: given}).status_code == 200


@pytest.mark.parametrize("key", ["../" * 1000, "' OR 1=1 --", "k" * 4096, "%00", "\t", '"a"', "{}", "café"])
def test_an_odd_key_is_no_key(keyed: Attacked, key: str) -> None:
    with Raw(keyed.url) as raw:
        raw.send(
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
            + key.encode()
            + b"\r\n\r\n"
        )
        reply = raw.replies(1)[0]
    assert reply.status == 401
    assert key.strip() == "" or key.encode() not in reply.body


def test_two_keys_in_one_request_are_none(keyed: Attacked) -> None:
    """Who is on the way may have looked at the other one."""
    line = f"Authorization: Bearer {KEY}\r\n"
    with Raw(keyed.url) as raw:
        raw.send(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{line}{line}\r\n".encode())
        assert raw.replies(1)[0].status == 400


def test_every_key_is_compared_and_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    real: Callable[[bytes, bytes], bool] = hmac.compare_digest

    def counted(one: bytes, two: bytes) -> bool:
        compared.append((len(one), len(two)))
        return real(one, two)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    Keys(["first", "a much longer second", "third"]).owner({b"authorization": b"Bearer first"})
    assert compared == [(32, 32)] * 3


# What is stored for one key


@pytest.mark.parametrize(
    ("make", "body", "paths"),
    [
        ("/v1/responses", {**good("/v1/responses"), "store": True},
         ["GET /v1/responses/{}", "GET /v1/responses/{}/input_items", "DELETE /v1/responses/{}",
          "POST /v1/responses/{}/cancel", "GET /v1/trajectories/{}"]),
        (CHAT, {**good(CHAT), "store": True},
         ["GET /v1/chat/completions/{}", "GET /v1/chat/completions/{}/messages",
          "DELETE /v1/chat/completions/{}"]),
        ("/v1/conversations", good("/v1/conversations"),
         ["GET /v1/conversations/{}", "GET /v1/conversations/{}/items", "DELETE /v1/conversations/{}"]),
    ],
    ids=["responses", "chat", "conversations"],
)  # fmt: skip
def test_another_key_sees_what_is_not_there(
    keyed: Attacked, make: str, body: dict[str, object], paths: list[str]
) -> None:
    made = keyed.client.post(make, json=body, headers={"authorization": f"Bearer {KEY}"}).json()["id"]
    unknown = made[:-4] + "0000"
    for method, path in (line.split() for line in paths):
        theirs = ask(keyed, method, path.format(made), authorization=f"Bearer {OTHER_KEY}")
        nobodys = ask(keyed, method, path.format(unknown), authorization=f"Bearer {OTHER_KEY}")
        assert theirs.status_code == 404
        assert theirs.text.replace(made, "ID") == nobodys.text.replace(unknown, "ID")


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_another_key_cannot_continue(keyed: Attacked, field: str) -> None:
    own, other = ({"authorization": f"Bearer {key}"} for key in (KEY, OTHER_KEY))
    kind = "/v1/responses" if field == "previous_response_id" else "/v1/conversations"
    made = keyed.client.post(kind, json={**good(kind)}, headers=own).json()["id"]
    body = good("/v1/responses")
    refused = keyed.client.post("/v1/responses", json={**body, field: made}, headers=other)
    unknown = keyed.client.post("/v1/responses", json={**body, field: made[:-4] + "0000"}, headers=other)
    assert refused.status_code == unknown.status_code
    assert refused.status_code in (400, 404)
    assert refused.text.replace(made, "ID") == unknown.text.replace(made[:-4] + "0000", "ID")
    assert keyed.client.post("/v1/responses", json={**body, field: made}, headers=own).status_code == 200


# Names


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "0"]
)
@pytest.mark.parametrize(
    "route", [("GET", "/health"), ("GET", "/v1/models"), ("POST", CHAT), ("OPTIONS", CHAT)], ids=name
)
def test_a_foreign_name_is_refused(server: Attacked, route: tuple[str, str], host: str) -> None:
    reply = ask(server, *route, host=f"{host}:8000")
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:8000", "[::1]", "localhost."]
)
def test_the_names_of_the_loopback_are_answered(server: Attacked, host: str) -> None:
    assert ask(server, "GET", "/v1/models", host=host).status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/nowhere"])
def test_a_socket_by_a_foreign_name_or_page_is_refused(server: Attacked, path: str) -> None:
    url = server.url.replace("http", "ws") + path
    with pytest.raises(InvalidStatus) as refused:
        connect(url, origin=FOREIGN)  # type: ignore[arg-type]
    assert refused.value.response.status_code == 403
    with Raw(server.url) as raw, pytest.raises(InvalidStatus) as refused:
        connect(url.replace("127.0.0.1", "evil.example"), sock=raw.socket)
    assert refused.value.response.status_code == 403


def test_further_names_may_be_allowed(sociable: Attacked) -> None:
    assert ask(sociable, "GET", "/health", host="my.example:443").status_code == 200
    assert ask(sociable, "GET", "/health", host="other.example").status_code == 403


# Pages


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
@pytest.mark.parametrize("path", ["/health", "/v1/models", CHAT, "/docs", "/nowhere"])
def test_a_foreign_page_is_refused(server: Attacked, method: str, path: str) -> None:
    for origin in (FOREIGN, "null", "http://localhost", "http://localhost.evil.example", "file://"):
        reply = server.client.request(method, path, headers={"origin": origin})
        assert reply.status_code == 403
        assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize("route", ROUTES, ids=name)
def test_a_foreign_page_is_refused_on_every_route(server: Attacked, route: tuple[str, str]) -> None:
    method, path = route
    assert ask(server, method, filled(path), origin=FOREIGN).status_code == 403


def test_our_own_page_may_ask(server: Attacked) -> None:
    assert ask(server, "GET", "/v1/models", origin=server.url).status_code == 200


def test_a_listed_page_may_ask_with_its_key(keyed: Attacked) -> None:
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


def test_a_listed_page_can_read_why_it_was_refused(keyed: Attacked) -> None:
    reply = ask(keyed, "GET", "/v1/models", origin=FRIEND)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (401, FRIEND)


def test_what_is_said_to_one_page_is_not_kept_for_another(keyed: Attacked) -> None:
    assert ask(keyed, "GET", "/health").headers["vary"] == "Origin"
    assert ask(keyed, "GET", "/health", origin=FRIEND).headers["vary"] == "Origin"
    assert ask(keyed, "GET", "/health", origin=FOREIGN).status_code == 403


def test_all_pages_may_be_let_in(sociable: Attacked) -> None:
    reply = ask(sociable, "GET", "/v1/models", origin=FOREIGN)
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")
    assert "access-control-allow-credentials" not in reply.headers


# Bodies


@pytest.mark.parametrize("route", POST)
@pytest.mark.parametrize(
    "media",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json", "", "jsonp"],
)
def test_a_form_is_no_request(frame: Frame, route: str, media: str) -> None:
    reply = frame.server.client.post(frame.server.path(route), content=BODY, headers={"content-type": media})
    assert reply.status_code == 415


@pytest.mark.parametrize("route", POST)
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
    "path", ["/v1/responses/", "/v1/conversations/", "/v1/chat/completions/", "/v1/models/"]
)
def test_an_odd_id_is_unknown(frame: Frame, path: str, id_: str) -> None:
    for method in ("GET", "DELETE"):
        if (method, path) != ("DELETE", "/v1/models/"):
            assert ask(frame.server, method, path + id_).status_code == 404


# What is said to browsers and of clients


def test_the_page_of_the_docs_fetches_nothing_from_elsewhere(server: Attacked) -> None:
    headers = ask(server, "GET", "/docs").headers
    policy = headers["content-security-policy"]
    assert (
        "default-src 'none'" in policy
        and "frame-ancestors 'none'" in policy
        and "script-src 'self'" in policy
    )
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


def test_answers_for_a_key_are_kept_by_nobody(keyed: Attacked) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    for body in (good(CHAT), {**good(CHAT), "stream": True}):
        reply = keyed.client.post(CHAT, json=body, headers=headers)
        assert (reply.status_code, reply.headers["cache-control"]) == (200, "no-store")
    assert ask(keyed, "GET", "/v1/models").headers["www-authenticate"] == "Bearer"


def test_nothing_that_clients_send_makes_a_metric(server: Attacked) -> None:
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


def test_only_one_port_listens(keyed: Attacked) -> None:
    assert len([one for one in held(keyed.process.pid) if one.listens]) == 1
