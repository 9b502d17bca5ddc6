"""SIGTERM: new work is refused, what runs has a grace to end in, and then everybody is told."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from msgspec import Struct
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from dragoman.http.server import background
from dragoman.settings import Settings
from tests.attacks.bodies import changed, good
from tests.attacks.frame import AttackedServer, attacked
from tests.support.parrot import parrot
from tests.support.responses import PATH, get, payloads
from tests.support.wait import becomes
from tests.support.wire import request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FOREVER_S = 600


@contextmanager
def still(**settings: Any) -> Iterator[AttackedServer]:
    """Its engine takes jobs and does nothing, until it is resumed."""
    with attacked(**settings) as server:
        assert server.client.post("/v1/engine/pause").status_code == 200
        yield server


def running(server: AttackedServer, count: int = 1) -> None:
    assert becomes(lambda: server.state().live == count)


def stop(server: AttackedServer) -> None:
    """Returns when it has taken notice."""
    server.process.terminate()
    assert becomes(lambda: httpx.get(f"{server.url}/ready").status_code == 503)


def ended(server: AttackedServer) -> bool:
    return server.process.wait(timeout=120) is not None


class Cut(Struct):
    """What clients got whose answers were being written when the server was stopped without a grace."""

    replies: dict[tuple[str, bool], httpx.Response]
    """By the path, and whether they were streamed."""
    socket: list[dict[str, Any]]
    data: str


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Cut:
    data = str(tmp_path_factory.mktemp("data"))
    with ThreadPoolExecutor(8) as pool, still(shutdown_grace=0, store="sqlite", data_dir=data) as server:
        asked = {
            (path, stream): pool.submit(server.client.post, path, json=changed(path, "stream", stream))
            for path in (CHAT, COMPLETIONS, PATH)
            for stream in (False, True)
        }
        over_socket = pool.submit(heard, server)
        running(server, 7)
        server.process.terminate()
        assert ended(server)
        return Cut({which: one.result() for which, one in asked.items()}, over_socket.result(), data)


def heard(server: AttackedServer) -> list[dict[str, Any]]:
    """All messages on a socket, until it is closed."""
    messages = []
    with connect(server.url.replace("http", "ws", 1) + PATH) as client, suppress(ConnectionClosed):
        client.send(json.dumps({"type": "response.create", **good(PATH)}))
        while True:
            messages.append(json.loads(client.recv()))
    return messages


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, PATH])
def test_a_whole_answer_that_is_cut_short_is_a_503(cut: Cut, path: str) -> None:
    reply = cut.replies[path, False]
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
    assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_that_is_cut_short_ends_with_an_error(cut: Cut, path: str) -> None:
    *_, last = cut.replies[path, True].text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"


def test_a_streamed_response_that_is_cut_short_has_failed_and_is_kept_so(cut: Cut) -> None:
    *_, last = payloads(cut.replies[PATH, True].content)
    assert last["type"] == "response.failed"
    with background(parrot(), Settings(port=0, store="sqlite", data_dir=cut.data)) as url:
        assert get(url, last["response"]["id"]).json() == last["response"]


def test_a_response_on_a_socket_that_is_cut_short_has_failed_and_has_one_end(cut: Cut) -> None:
    kinds = [message["type"] for message in cut.socket]
    assert (kinds[-1], kinds.count("error")) == ("response.failed", 0)


def test_what_runs_and_what_waits_comes_to_its_end_within_the_grace() -> None:
    with ThreadPoolExecutor(8) as pool, still(shutdown_grace=FOREVER_S, limits={"in_flight": 1}) as server:
        body = changed(CHAT, "stream", True)
        asked = [pool.submit(server.client.post, CHAT, json=body) for _ in range(3)]
        assert becomes(lambda: 'answers_waiting{model="parrot"} 2.0' in server.client.get("/metrics").text)
        stop(server)
        assert server.client.post("/v1/engine/resume").status_code == 200
        assert all("[DONE]" in one.result().text for one in asked)
        assert ended(server)


def test_new_work_is_refused_while_the_old_goes_on() -> None:
    with ThreadPoolExecutor(8) as pool, still(shutdown_grace=FOREVER_S) as server:
        pool.submit(server.client.post, CHAT, json=changed(CHAT, "stream", True))
        running(server)
        stop(server)
        new = httpx.post(server.url + CHAT, json=good(CHAT))
        assert (new.status_code, new.json()["error"]["code"]) == (503, "stopping")
        assert (new.headers["connection"], int(new.headers["retry-after"])) == ("close", 1)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.state().live == 1


def test_a_second_signal_ends_the_grace() -> None:
    with ThreadPoolExecutor(8) as pool, still(shutdown_grace=FOREVER_S) as server:
        asked = pool.submit(server.client.post, CHAT, json=good(CHAT))
        running(server)
        stop(server)
        server.process.terminate()
        assert asked.result().status_code == 503
        assert ended(server)


def test_a_client_that_reads_nothing_does_not_keep_the_server() -> None:
    with attacked(shutdown_grace=0) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((urlsplit(server.url).hostname, urlsplit(server.url).port))
        long = {"messages": [{"role": "user", "content": "x" * 2000}], "stream": True, "n": 16}
        client.sendall(request(server.url, CHAT, long))
        assert client.recv(1)
        server.process.terminate()
        assert ended(server)
