"""Who gets in: keys, over every route there is."""

import random
from hashlib import sha256

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.keys import ApiKeys
from dragoman.http.routes.table import OPEN_PATHS
from dragoman.http.routes.web_ui import find_files
from dragoman.http.server import background
from dragoman.settings import Settings
from tests.attacks.bodies import good
from tests.attacks.doors import CHAT, CLOSED, KEY, OTHER_KEY, ask, filled, name
from tests.attacks.frame import AttackedServer
from tests.attacks.raw_socket import Raw
from tests.support.parrot import NAME


def test_what_is_open() -> None:
    """The others ask for a key because they are not on this list, so a new one does too."""
    probes = {"/health", "/healthz", "/ping", "/ready", "/api/hello"}
    page = {"/", "/docs", *(f"/page/{name}" for name in find_files())}
    assert probes | page | {"/openapi.json"} == OPEN_PATHS


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_what_is_open_tells_nothing_of_this_server(keyed: AttackedServer, path: str) -> None:
    reply = ask(keyed, "GET", path)
    assert reply.status_code in (200, 307)
    assert NAME not in reply.text
    assert KEY not in reply.text
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(keyed, method, path).status_code == 401


def test_ready_names_the_model_to_those_who_may_ask_it(keyed: AttackedServer) -> None:
    assert ask(keyed, "GET", "/ready").json() == {"status": "ready"}
    assert ask(keyed, "GET", "/ready", authorization="Bearer wrong").json() == {"status": "ready"}
    body = ask(keyed, "GET", "/ready", authorization=f"Bearer {KEY}").json()
    assert body == {"status": "ready", "model": NAME}


@pytest.mark.parametrize(("metrics", "without", "with_key"), [("open", 200, 200), ("off", 401, 404)])
def test_metrics_are_open_to_everybody_or_to_nobody(metrics: str, without: int, with_key: int) -> None:
    settings = Settings(port=0, store="memory", api_key=[KEY], metrics=metrics)  # type: ignore[arg-type]
    with background(ScriptedEngine(say("hi")), settings) as url:
        assert httpx.get(f"{url}/metrics").status_code == without
        assert httpx.get(f"{url}/metrics", headers={"x-api-key": KEY}).status_code == with_key


@pytest.mark.parametrize("route", CLOSED, ids=name)
def test_without_the_key_no_route_is_open(keyed: AttackedServer, route: tuple[str, str]) -> None:
    method, path = route
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"x-api-key": ""},
    ):
        assert ask(keyed, method, filled(path), **headers).status_code == 401


@pytest.mark.parametrize("route", CLOSED, ids=name)
def test_no_host_opens_a_route(keyed: AttackedServer, route: tuple[str, str]) -> None:
    """Others rebuilt the path that they asked the key for from this header."""
    method, path = route
    for host in (b"a/?x=", b"a/#", b"/health?x=", b"localhost/health", b"localhost"):
        with Raw(keyed.url) as raw:
            raw.send(b"%s %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (method.encode(), filled(path).encode(), host))
            assert raw.replies(1)[0].status == (401 if host == b"localhost" else 400)


@pytest.mark.parametrize(
    "path",
    ["/health/", "//health", "/health/../v1/models", "/v1/models;/health", "/v1/models%3f/health", "/HEALTH",
     "/v1/models#/health", "/%68ealth", "/health%00", "/v1/models?/health", "/docs/", "/docs/../metrics",
     "//docs", "/ready;", "/Ready", "/.", "//", "/metrics?/", "/pause", "/v1/health", "/ping/",
     "/v1/v1/models", "/models", "/v1/models/", "//healthz", "/v1/engine/pause/"],
)  # fmt: skip
def test_what_looks_like_health_is_closed(keyed: AttackedServer, path: str) -> None:
    with Raw(keyed.url) as raw:
        raw.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert raw.replies(1)[0].status == 401


def test_any_path_is_closed(keyed: AttackedServer) -> None:
    chance = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789/._-~%3Fv1"
    for _ in range(300):
        path = "/" + "".join(chance.choices(letters, k=chance.randint(1, 40)))
        method = chance.choice(["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
        assert ask(keyed, method, keyed.url + path).status_code == 401


def test_a_socket_needs_the_key(keyed: AttackedServer) -> None:
    url = keyed.url.replace("http", "ws") + "/v1/responses"
    with pytest.raises(InvalidStatus) as refused:
        connect(url)
    assert refused.value.response.status_code == 401
    with connect(url, additional_headers={"authorization": f"Bearer {KEY}"}):
        pass


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_either_key_opens_in_either_header(keyed: AttackedServer, key: str, header: str) -> None:
    text = f"Bearer {key}" if header == "authorization" else key
    assert ask(keyed, "GET", "/v1/models", **{header: text}).status_code == 200


@pytest.mark.parametrize("key", ["../" * 1000, "' OR 1=1 --", "k" * 4096, "%00", "\t", '"a"', "{}", "café"])
def test_an_odd_key_is_no_key(keyed: AttackedServer, key: str) -> None:
    with Raw(keyed.url) as raw:
        raw.send(
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
            + key.encode()
            + b"\r\n\r\n"
        )
        reply = raw.replies(1)[0]
    assert reply.status == 401
    assert key.strip() == "" or key.encode() not in reply.body


def test_two_keys_in_one_request_are_none(keyed: AttackedServer) -> None:
    """Who is on the way may have looked at the other one."""
    line = f"Authorization: Bearer {KEY}\r\n"
    with Raw(keyed.url) as raw:
        raw.send(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{line}{line}\r\n".encode())
        assert raw.replies(1)[0].status == 400


def test_a_server_knows_keys_by_their_hashes_alone() -> None:
    """What is looked up is a hash: how long that takes tells nothing of a key, and a dump of it has none."""
    keys = ApiKeys(Settings(api_key=[KEY], admin_key=[OTHER_KEY]))
    assert (
        keys.authenticate({b"authorization": b"Bearer " + KEY.encode()}).sha256
        == sha256(KEY.encode()).hexdigest()
    )
    text = repr([vars(keys), *keys._known.items()])
    assert KEY not in text and OTHER_KEY not in text


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
    keyed: AttackedServer, make: str, body: dict[str, object], paths: list[str]
) -> None:
    result = keyed.client.post(make, json=body, headers={"authorization": f"Bearer {KEY}"}).json()["id"]
    unknown = result[:-4] + "0000"
    for method, path in (line.split() for line in paths):
        theirs = ask(keyed, method, path.format(result), authorization=f"Bearer {OTHER_KEY}")
        nobodys = ask(keyed, method, path.format(unknown), authorization=f"Bearer {OTHER_KEY}")
        assert theirs.status_code == 404
        assert theirs.text.replace(result, "ID") == nobodys.text.replace(unknown, "ID")


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_another_key_cannot_continue(keyed: AttackedServer, field: str) -> None:
    own, other = ({"authorization": f"Bearer {key}"} for key in (KEY, OTHER_KEY))
    kind = "/v1/responses" if field == "previous_response_id" else "/v1/conversations"
    result = keyed.client.post(kind, json={**good(kind)}, headers=own).json()["id"]
    body = good("/v1/responses")
    refused = keyed.client.post("/v1/responses", json={**body, field: result}, headers=other)
    unknown = keyed.client.post("/v1/responses", json={**body, field: result[:-4] + "0000"}, headers=other)
    assert refused.status_code == unknown.status_code
    assert refused.status_code in (400, 404)
    assert refused.text.replace(result, "ID") == unknown.text.replace(result[:-4] + "0000", "ID")
    assert keyed.client.post("/v1/responses", json={**body, field: result}, headers=own).status_code == 200
