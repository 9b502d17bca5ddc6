"""The door: requests pass to replicas and back, and clients are told when a replica dies. No Ray in it."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import uvicorn

from dragoman.engines.protocol import ModelCard
from dragoman.engines.scripted import CHATML, ScriptedEngine, say
from dragoman.http.server import background
from dragoman.ray.fleet import Fleet, ReplicaHeartbeat
from dragoman.ray.ingress import MOST_INSIDE, Ingress
from dragoman.settings import Settings
from tests.support.raw_server import RawServer, raw_server
from tests.support.wait import becomes

BODY = {"model": "one", "messages": [{"role": "user", "content": "hi"}]}
EVENT = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'


def engine(name: str = "one", text: str = "hello") -> ScriptedEngine:
    card = ModelCard(name=name, max_model_len=4096, templates={"default": CHATML})
    return ScriptedEngine(say(text), card=card)


@contextmanager
def dying(said: bytes) -> Iterator[tuple[RawServer, ReplicaHeartbeat]]:
    """A replica that answers as far as it is told, and is gone."""
    with raw_server([said]) as server:
        yield server, beat("dying", server.url)


@contextmanager
def opened(fleet: Fleet, settings: Settings | None = None, most: int = MOST_INSIDE) -> Iterator[httpx.Client]:
    door = Ingress(fleet, settings or Settings(), most)
    server = uvicorn.Server(uvicorn.Config(door, port=0, log_level="critical", lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def beat(id_: str, address: str, model: str = "one") -> ReplicaHeartbeat:
    return ReplicaHeartbeat(id_, model, "127.0.0.1", int(address.rpartition(":")[2]))


@contextmanager
def fleet_of(*engines: ScriptedEngine, settings: Settings | None = None) -> Iterator[Fleet]:
    """A server for each engine; of those with the same name each is a replica."""
    fleet = Fleet(list({each.card.name: None for each in engines}))
    with ExitStack() as servers:
        for number, each in enumerate(engines):
            address = servers.enter_context(background(each, settings or Settings(port=0, store="none")))
            fleet.update(beat(f"replica-{number}", address, each.card.name))
        yield fleet


def stream_head(kind: str = "text/event-stream") -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def streamed(client: httpx.Client, path: str = "/v1/chat/completions", **more: object) -> list[str]:
    with client.stream("POST", path, json={**BODY, "stream": True, **more}) as reply:
        assert reply.status_code == 200
        return [line for line in reply.iter_lines() if line]


def test_a_reply_passes_as_it_is() -> None:
    with fleet_of(engine()) as fleet, opened(fleet) as client:
        reply = client.post("/v1/chat/completions", json=BODY)
        assert reply.json()["choices"][0]["message"]["content"] == "hello"
        assert reply.headers["x-dragoman-replica"] == "replica-0"
        lines = streamed(client)
        text = "".join(
            json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines[:-1]
        )
        assert text == "hello" and lines[-1] == "data: [DONE]"


def test_the_replica_says_what_is_wrong() -> None:
    with fleet_of(engine()) as fleet, opened(fleet) as client:
        reply = client.post("/v1/chat/completions", json={"model": "one"})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages"
        assert client.get("/v1/nothing").status_code == 404
        assert client.get("/v1/models").json()["data"][0]["id"] == "one"


def test_models_are_told_apart() -> None:
    with fleet_of(engine("one", "first"), engine("two", "second")) as fleet, opened(fleet) as client:
        for name, text in (("one", "first"), ("two", "second")):
            reply = client.post("/v1/chat/completions", json={**BODY, "model": name})
            assert reply.json()["choices"][0]["message"]["content"] == text
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["one", "two"]
        missing = client.post("/v1/chat/completions", json={**BODY, "model": "three"})
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "name"),
    [("/v1/chat/completions", "data"), ("/v1/responses", "event: error"), ("/v1/messages", "event: error")],
)
def test_a_stream_whose_replica_dies_ends_with_an_error_event(path: str, name: str) -> None:
    whole = chunk(EVENT) + chunk(EVENT) + chunk(b'data: {"half')
    with dying(stream_head() + whole) as (_, heartbeat):
        fleet = Fleet(["one"])
        fleet.update(heartbeat)
        with opened(fleet) as client:
            lines = streamed(client, path)
    assert lines[:2] == [EVENT.decode().strip()] * 2
    assert lines[2].startswith(name) and "half" not in "".join(lines)
    error = json.loads(lines[-1].partition("data: ")[2])
    assert "replica" in json.dumps(error)


def test_a_line_of_json_is_ended_too() -> None:
    data = stream_head("application/x-ndjson") + chunk(b'{"done": false}\n') + chunk(b'{"do')
    with dying(data) as (_, heartbeat):
        fleet = Fleet(["one"])
        fleet.update(heartbeat)
        with opened(fleet) as client:
            lines = streamed(client, "/api/chat")
    assert json.loads(lines[0]) == {"done": False} and "error" in json.loads(lines[-1])


def test_what_is_no_stream_breaks_off() -> None:
    data = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
    with dying(data) as (_, heartbeat):
        fleet = Fleet(["one"])
        fleet.update(heartbeat)
        with opened(fleet) as client, pytest.raises(httpx.RemoteProtocolError):
            client.post("/v1/chat/completions", json=BODY)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 503 Unavailable\r\ncontent-length: 0\r\n\r\n"])
def test_another_replica_is_asked_where_one_has_not_answered(said: bytes) -> None:
    with dying(said) as (replica, heartbeat), fleet_of(engine()) as fleet:
        fleet.update(heartbeat)
        with opened(fleet) as client:
            while not replica.heard:
                reply = client.post("/v1/chat/completions", json=BODY)
                assert reply.status_code == 200 and reply.headers["x-dragoman-replica"] == "replica-0"
                fleet.update(heartbeat)


def test_what_may_have_been_done_is_not_done_twice() -> None:
    with dying(b"") as (replica, heartbeat), fleet_of(engine()) as fleet:
        fleet.drop("replica-0")
        fleet.update(heartbeat)
        with opened(fleet) as client:
            reply = client.post("/v1/conversations", json={})
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "replica_lost"
    assert len(replica.heard) == 1


def test_nobody_is_there() -> None:
    fleet = Fleet(["one"])
    with opened(fleet) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 503
        reply = client.post("/v1/chat/completions", json=BODY)
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "no_replica"


def test_a_replica_that_leaves_is_not_asked() -> None:
    with fleet_of(engine(), engine()) as fleet, opened(fleet) as client:
        fleet.update(ReplicaHeartbeat("replica-0", "one", "127.0.0.1", 1, leaving=True))
        asked = {client.get("/v1/models").headers["x-dragoman-replica"] for _ in range(4)}
    assert asked == {"replica-1"}


def test_keys_are_asked_for_before_a_body_is_read() -> None:
    settings = Settings(api_key=["secret-secret-secret"], port=0, store="none")
    with fleet_of(engine(), settings=settings) as fleet, opened(fleet, settings) as client:
        assert client.post("/v1/chat/completions", json=BODY).status_code == 401
        good = {"authorization": "Bearer secret-secret-secret"}
        assert client.post("/v1/chat/completions", json=BODY, headers=good).status_code == 200


def test_a_body_has_a_limit() -> None:
    with fleet_of(engine()) as fleet, opened(fleet) as client:
        reply = client.post("/v1/chat/completions", content=b"x" * (16 * 1024 * 1024 + 1))
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "body_too_large"


def test_files_pass_as_they_come() -> None:
    with fleet_of(engine()) as fleet, opened(fleet) as client:
        data = b"y" * 3_000_000
        reply = client.post("/v1/files", files={"file": ("a.txt", data)}, data={"purpose": "user_data"})
        assert reply.status_code == 200 and reply.json()["bytes"] == len(data)
        assert client.get(f"/v1/files/{reply.json()['id']}/content").content == data


def test_what_keys_took_is_told_to_the_others() -> None:
    fleet = Fleet(["one"])
    heard = [
        fleet.update(ReplicaHeartbeat(id_, "one", "127.0.0.1", 1, taken=(7, {"key": 5}))) for id_ in "ab"
    ]
    assert [news.taken for news in heard] == [{}, {"a": (7, {"key": 5})}]
    fleet.update(ReplicaHeartbeat("a", "one", "127.0.0.1", 1, taken=(7, {"key": 6}), leaving=True))
    assert fleet.update(ReplicaHeartbeat("c", "one", "127.0.0.1", 1)).taken["a"] == (7, {"key": 6})
    assert fleet.update(ReplicaHeartbeat("c", "one", "127.0.0.1", 1, taken=(8, {"key": 1}))).taken.keys() == {
        "b"
    }


def names(replies: Sequence[httpx.Response]) -> list[str]:
    return [reply.headers["x-dragoman-replica"] for reply in replies]


def test_a_conversation_stays_where_it_is() -> None:
    with fleet_of(*[engine()] * 1, engine(), engine()) as fleet, opened(fleet) as client:
        for session in ("a", "b", "c", "d"):
            asked = [
                client.post("/v1/chat/completions", json=BODY, headers={"x-session-id": session})
                for _ in range(3)
            ]
            assert len({*names(asked)}) == 1


def test_a_client_that_leaves_ends_its_answer() -> None:
    slow = engine(text="x" * 2000)
    slow._interval = 0.01
    with fleet_of(slow) as fleet, opened(fleet) as client:
        with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as reply:
            # Without a name for it, it would be dropped at once, and the connection closed with it.
            lines = reply.iter_lines()
            next(lines)
            assert becomes(lambda: slow.live == 1)
        assert becomes(lambda: slow.live == 0)
