"""What clients may hold at the door, sockets through it, and who is asked for a response. No Ray in it."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import httpx
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.connection import Connection
from websockets.sync.server import ServerConnection, serve

from dragoman.engines.scripted import ScriptedEngine
from dragoman.limits import Limits
from dragoman.ray.fleet import Fleet, ReplicaHeartbeat
from dragoman.settings import Settings
from tests.ray.test_ingress import BODY, beat, engine, fleet_of, opened
from tests.support.wait import becomes

KEYS = ["first-first-first-key", "second-second-second"]
KEYED = Settings(api_key=KEYS, port=0, store="none")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def slow_engine(name: str = "one") -> ScriptedEngine:
    slow = engine(name, "x" * 2000)
    slow._interval = 0.01
    return slow


@contextmanager
def half_sent(client: httpx.Client, length: int, sent: bytes) -> Iterator[socket.socket]:
    """A body of which the rest does not come."""
    where = client.base_url
    with closing(socket.create_connection((where.host, where.port))) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n"
        connection.sendall(head.encode() + sent)
        yield connection


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    settings = Settings(port=0, store="none", body_timeout=0.05)
    with fleet_of(engine()) as fleet, opened(fleet, settings) as client:
        with half_sent(client, 100, b"{") as connection:
            data = b"".join(iter(lambda: connection.recv(4096), b""))
        assert data.startswith(b"HTTP/1.1 408") and b"not arrive in time" in data


def test_all_bodies_together_have_a_limit() -> None:
    limits = Limits(bodies_bytes=300_000)
    settings = Settings(port=0, store="none", limits=limits)
    with fleet_of(engine()) as fleet, opened(fleet, settings) as client:
        with half_sent(client, 250_000, b" " * 200_000):
            large = {**BODY, "user": "x" * 200_000}
            refused = httpx.Response(200)

            def is_refused() -> bool:
                nonlocal refused
                refused = client.post("/v1/chat/completions", json=large)
                return refused.status_code == 503

            assert becomes(is_refused)
            assert "bodies" in refused.json()["error"]["message"]
            assert client.post("/v1/chat/completions", json=BODY).status_code == 200
        assert becomes(lambda: not is_refused())


def test_a_key_has_so_many_inside_at_all_replicas() -> None:
    settings = replace(KEYED, limits=Limits(per_key=2))
    slow = slow_engine(), slow_engine()
    with fleet_of(*slow, settings=KEYED) as fleet, opened(fleet, settings) as client:
        first, second = bearer(KEYS[0]), bearer(KEYS[1])
        asked = {**BODY, "stream": True}
        with (
            client.stream("POST", "/v1/chat/completions", json=asked, headers=first) as one,
            client.stream("POST", "/v1/chat/completions", json=asked, headers=first) as two,
        ):
            assert (one.status_code, two.status_code) == (200, 200)
            refused = client.post("/v1/chat/completions", json=BODY, headers=first)
            assert refused.status_code == 429 and "already has 2 requests" in refused.text
            with client.stream("POST", "/v1/chat/completions", json=asked, headers=second) as other:
                assert other.status_code == 200
        assert becomes(lambda: not sum(each.live for each in slow))


def test_no_key_fills_the_door() -> None:
    with fleet_of(slow_engine(), settings=KEYED) as fleet, opened(fleet, KEYED, most=2) as client:
        asked, first, second = {**BODY, "stream": True}, bearer(KEYS[0]), bearer(KEYS[1])
        with (
            client.stream("POST", "/v1/chat/completions", json=asked, headers=first),
            client.stream("POST", "/v1/chat/completions", json=asked, headers=first),
        ):
            assert client.post("/v1/chat/completions", json=BODY, headers=first).status_code == 429
            with client.stream("POST", "/v1/chat/completions", json=asked, headers=second) as other:
                assert other.status_code == 200


def test_who_makes_a_response_is_asked_for_it() -> None:
    background = {"model": "two", "input": "hi", "background": True}
    settings = Settings(port=0, store="memory")
    models = slow_engine("one"), slow_engine("two"), slow_engine("two")
    with fleet_of(*models, settings=settings) as fleet, opened(fleet, settings) as client:
        for number in range(4):
            reply = client.post("/v1/responses", json={**background, "input": f"{number} " * 20})
            id_, maker = reply.json()["id"], reply.headers["x-dragoman-replica"]
            assert reply.headers["x-dragoman-response"] == id_
            with client.stream("GET", f"/v1/responses/{id_}", params={"stream": "true"}) as events:
                assert events.status_code == 200 and events.headers["x-dragoman-replica"] == maker
                assert next(events.iter_lines()).startswith("event: ")
            over = client.post(f"/v1/responses/{id_}/cancel")
            assert over.json()["status"] == "cancelled"


def test_replicas_say_what_they_make() -> None:
    """For doors through which it was not asked."""
    fleet = Fleet(["one"])
    fleet.update(ReplicaHeartbeat("a", "one", "127.0.0.1", 1))
    fleet.update(ReplicaHeartbeat("b", "one", "127.0.0.1", 2, making=["resp_1"]))
    maker = fleet.producer("resp_1")
    assert maker is not None and maker.id == "b"
    fleet.drop("b")
    assert fleet.producer("resp_1") is None


def test_a_response_is_gone_on_with_where_it_was_made() -> None:
    settings = Settings(port=0, store="memory")
    with fleet_of(engine(), engine(), engine(), settings=settings) as fleet, opened(fleet) as client:
        for number in range(4):
            asked = {"model": "one", "input": f"{number} " * 20}
            first = client.post("/v1/responses", json=asked)
            more = {**asked, "input": "and?", "previous_response_id": first.json()["id"]}
            second = client.post("/v1/responses", json=more)
            assert second.status_code == 200, second.text
            assert second.headers["x-dragoman-replica"] == first.headers["x-dragoman-replica"]


def test_the_name_that_a_client_has_for_us_goes_on() -> None:
    """So that a page of ours may ask, and one that has given itself our address may not."""
    with fleet_of(engine()) as fleet, opened(fleet) as client:
        own = {"host": "localhost:1", "origin": "http://localhost:1"}
        assert client.post("/v1/chat/completions", json=BODY, headers=own).status_code == 200
        other = {"host": "evil.example"}
        assert client.post("/v1/chat/completions", json=BODY, headers=other).status_code == 403


@contextmanager
def socket_of(client: httpx.Client, **headers: str) -> Iterator[Connection]:
    where = client.base_url
    url = f"ws://{where.host}:{where.port}/v1/responses"
    with connect(url, additional_headers=headers, proxy=None, compression=None) as opened_socket:
        yield opened_socket


def test_sockets_go_through() -> None:
    with fleet_of(engine("one", "first"), engine("two", "second")) as fleet, opened(fleet) as client:
        for model, text in (("one", "first"), ("two", "second")):
            with socket_of(client) as connection:
                for _ in range(2):
                    connection.send(json.dumps({"type": "response.create", "model": model, "input": "hi"}))
                    events = [json.loads(connection.recv())]
                    while events[-1]["type"] != "response.completed":
                        events.append(json.loads(connection.recv()))
                    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text


def test_a_socket_that_says_nothing_is_inside() -> None:
    with fleet_of(engine()) as fleet, opened(fleet, most=1) as client, socket_of(client):
        assert becomes(lambda: client.post("/v1/chat/completions", json=BODY).status_code == 429)


def test_a_socket_needs_a_key() -> None:
    with fleet_of(engine(), settings=KEYED) as fleet, opened(fleet, KEYED) as client:
        with socket_of(client, **bearer(KEYS[0])) as connection:
            connection.send(json.dumps({"type": "response.create", "model": "one", "input": "hi"}))
            assert json.loads(connection.recv())["type"] == "response.created"
        with pytest.raises(InvalidStatus, match="403"), socket_of(client):
            pass


@contextmanager
def dying_socket() -> Iterator[int]:
    """A replica that takes a message and is gone."""

    def die(connection: ServerConnection) -> None:
        connection.recv()
        connection.socket.shutdown(socket.SHUT_RDWR)

    with serve(die, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.socket.getsockname()[1]
        finally:
            server.shutdown()
            thread.join()


def test_a_socket_whose_replica_dies_is_told_so() -> None:
    with dying_socket() as port:
        fleet = Fleet(["one"])
        fleet.update(beat("dying", f"http://127.0.0.1:{port}"))
        with opened(fleet) as client, socket_of(client) as connection:
            connection.send(json.dumps({"type": "response.create", "model": "one", "input": "hi"}))
            result = json.loads(connection.recv())
            assert result["type"] == "error" and result["error"]["code"] == "replica_lost"
            with pytest.raises(ConnectionClosed):
                connection.recv()


def test_a_socket_to_nobody_is_told_so() -> None:
    with opened(Fleet(["one"])) as client, socket_of(client) as connection:
        connection.send(json.dumps({"type": "response.create", "model": "one", "input": "hi"}))
        assert json.loads(connection.recv())["error"]["code"] == "no_replica"


def test_figures_are_of_all_replicas() -> None:
    """By the names that the inference extension of Gateway API reads."""
    settings = Settings(port=0, store="none", metrics_names="vllm", metrics="open")
    fleet = Fleet(["one", "two"])
    for id_, kv in (("a", 0.25), ("b", 0.75)):
        more = {"running": 2, "waiting": 1, "kv": kv, "adapters": [id_], "most_adapters": 4}
        fleet.update(ReplicaHeartbeat(id_, "one", "127.0.0.1", 1, **more))  # type: ignore[arg-type]
    with opened(fleet, settings) as client:
        reply = client.get("/metrics")
    mapping = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }
    assert mapping["vllm:num_requests_waiting", "one"] == mapping["dragoman_answers_waiting", "one"] == 2
    assert mapping["vllm:num_requests_running", "one"] == 4
    assert mapping["vllm:kv_cache_usage_perc", "one"] == 0.5
    assert ("vllm:lora_requests_info", "4", "a,b", "") in mapping
    assert (mapping["dragoman_replicas", "one"], mapping["dragoman_replicas", "two"]) == (2, 0)


def test_figures_of_one_replica() -> None:
    with fleet_of(engine(), engine()) as fleet, opened(fleet) as client:
        reply = client.get("/metrics", params={"replica": "replica-1"})
        assert reply.headers["x-dragoman-replica"] == "replica-1" and "dragoman_build_info" in reply.text
        assert client.get("/metrics", params={"replica": "other"}).status_code == 404
