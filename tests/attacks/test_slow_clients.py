"""Clients that take their time, or too much: with their requests, with their bodies, with reading."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.attacks.bodies import good
from tests.attacks.frame import AttackedServer, attacked, healthy
from tests.attacks.raw_messages import BODY, HOST, JSON, PATH, get, post
from tests.attacks.raw_socket import Raw, held
from tests.support.wait import becomes

SOON_S = 0.5
"""How long such a server waits for whatever it waits for."""
MB = 1024 * 1024
CAP = MB
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "long " * 400}], "max_tokens": 2000, "n": 2}
"""Its answer is about a megabyte as a stream, or with log probabilities."""
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def hasty() -> Iterator[AttackedServer]:
    with attacked(
        header_timeout=SOON_S,
        body_timeout=SOON_S,
        write_timeout=SOON_S,
        idle_timeout=SOON_S,
        limits={"body_bytes": CAP},
    ) as server:
        yield server


def request(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(raw) + raw


def dribbled(raw: Raw, data: bytes = b"a") -> None:
    """One byte after the other, for as long as the server takes them."""
    raw.socket.settimeout(0.02)
    while raw.send(data):
        try:
            if not raw.socket.recv(1, 2):  # only looked at
                return
        except TimeoutError:
            continue
        except ConnectionError:
            return
        return


@pytest.mark.parametrize(
    "begun",
    [b"G", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\n" + HOST, get() + b"GET"],
    ids=["a letter", "a line", "a header", "a second one"],
)
def test_a_head_that_does_not_come_is_given_up(hasty: AttackedServer, begun: bytes) -> None:
    with healthy(hasty), Raw(hasty.url) as raw:
        raw.send(begun)
        last = raw.replies()[-1]
    assert (last.status, last.error["code"]) == (408, "request_timeout")


def test_a_head_that_comes_in_drops_is_given_up(hasty: AttackedServer) -> None:
    with Raw(hasty.url) as raw:
        raw.send(b"GET /health HTTP/1.1\r\nX: ")
        dribbled(raw)
        raw.socket.settimeout(60)
        assert [reply.status for reply in raw.replies()] == [408]


@pytest.mark.parametrize("noise", [b"", b"\r\n", b"\r"])
def test_a_connection_on_which_nobody_asks_is_closed(hasty: AttackedServer, noise: bytes) -> None:
    with Raw(hasty.url) as raw:
        if noise:
            dribbled(raw, noise)
        assert raw.rest() == b""


def test_a_connection_is_kept_for_a_while_only(hasty: AttackedServer) -> None:
    with Raw(hasty.url) as raw:
        raw.send(get())
        assert [reply.status for reply in raw.replies()] == [200]


@pytest.mark.parametrize(
    "begun",
    [
        post(b"Content-Length: 100\r\n", BODY),
        post(b"Content-Length: 100\r\n"),
        post(b"Transfer-Encoding: chunked\r\n", b"10\r\n" + BODY + b"\r\n"),
        post(b"Transfer-Encoding: chunked\r\n", b"10\r\n" + BODY + b"\r\n0\r\nX: a"),
    ],
    ids=["some of it", "none", "a chunk", "a trailer"],
)
def test_a_body_that_does_not_come_is_given_up(hasty: AttackedServer, begun: bytes) -> None:
    with healthy(hasty), Raw(hasty.url) as raw:
        raw.send(begun)
        (reply,) = raw.replies()
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")


def test_a_body_that_comes_in_drops_is_given_up(hasty: AttackedServer) -> None:
    with Raw(hasty.url) as raw:
        raw.send(post(b"Content-Length: 100000\r\n", b"{"))
        dribbled(raw, b" ")
        raw.socket.settimeout(60)
        assert [reply.status for reply in raw.replies()] == [408]


def test_a_body_that_nobody_reads_is_not_waited_for(hasty: AttackedServer) -> None:
    """The answer is there long before."""
    with Raw(hasty.url) as raw:
        raw.send(b"POST /nowhere HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: 100000\r\n\r\n")
        dribbled(raw, b" ")
        raw.socket.settimeout(60)
        assert [reply.status for reply in raw.replies()] == [404]


@pytest.mark.parametrize("path", [PATH, b"/nowhere", b"/health"])
def test_an_endless_body_is_cut(hasty: AttackedServer, path: bytes) -> None:
    """Only so much of it fits into what two systems keep for a connection."""
    before = hasty.memory()
    head = b"POST " + path + b" HTTP/1.1\r\n" + HOST + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
    with Raw(hasty.url) as raw:
        sent = raw.send(head + b"10000\r\n" + b" " * 65536)
        for _ in range(1024):
            piece = raw.send(b"\r\n10000\r\n" + b" " * 65536)
            sent += piece
            if piece < 65536:
                break
        statuses = [reply.status for reply in raw.replies()]
    assert statuses == [413 if path == PATH else 404 if path == b"/nowhere" else 405]
    assert sent < CAP + 16 * MB
    assert hasty.memory() - before < 4 * CAP


def test_a_long_body_is_refused_by_its_length(hasty: AttackedServer) -> None:
    with Raw(hasty.url) as raw:
        raw.send(post(b"Content-Length: %d\r\n" % 2**60))
        (reply,) = raw.replies()
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    "body",
    [{**LONG, "stream": True}, {**LONG, "logprobs": True, "top_logprobs": 20}],
    ids=["a stream", "a whole answer"],
)
def test_a_client_that_reads_nothing_is_cut_off(hasty: AttackedServer, body: dict[str, Any]) -> None:
    with Raw(hasty.url, receive_bytes=4096) as raw:
        own = raw.socket.getsockname()[1]
        raw.send(request(CHAT, body))
        assert raw.socket.recv(1) == b"H"
        assert becomes(lambda: own not in [one.port for one in held(hasty.process.pid)])
        assert hasty.state().live == 0


def test_a_client_that_leaves_is_noticed_behind_a_second_request() -> None:
    with attacked(interval=0.01) as server:
        with Raw(server.url) as raw:
            raw.send(request(CHAT, LONG) + get())
            assert becomes(lambda: server.state().live > 0)
        assert becomes(lambda: server.state().live == 0)


def test_one_connection_too_many_is_told_so() -> None:
    most = 8
    with attacked(interval=0.01, limits={"connections": most}) as server:
        held = []
        for _ in range(most):
            held.append(Raw(server.url))
            held[-1].send(request(CHAT, {**LONG, "n": 1}))
            assert becomes(lambda: server.state().live == len(held))
        with Raw(server.url) as late:
            data = late.rest()
        assert data.startswith(b"HTTP/1.1 503") and b"retry-after: " in data.lower()
        for raw in held:
            raw.socket.close()
        assert becomes(lambda: server.client.get("/health").status_code == 200)


def test_an_upload_that_was_refused_is_told_why(hasty: AttackedServer) -> None:
    """Its client is still sending: closing at once would take the answer from it."""
    reply = hasty.client.post(CHAT, content=b" " * (4 * CAP), headers={"content-type": "application/json"})
    assert reply.status_code == 413
    assert hasty.client.post(CHAT, json=good(CHAT)).status_code == 200
