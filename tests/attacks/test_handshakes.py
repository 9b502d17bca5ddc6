"""Connections that have shown no key yet: none is without an end, and they keep out nobody who has one."""

from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.attacks.frame import AttackedServer, attacked
from tests.attacks.raw_frames import KEY, LINE, PING, PONG, VERSION, RawSocket, frame, handshake
from tests.attacks.raw_messages import get
from tests.attacks.raw_socket import Raw
from tests.support.wait import becomes

SECRET, OTHER = "sk-one", "sk-two"
PLACES = 16


@pytest.fixture(scope="module")
def server() -> Iterator[AttackedServer]:
    with attacked() as attacked_server:
        yield attacked_server


@pytest.fixture(scope="module")
def keyed() -> Iterator[AttackedServer]:
    """With few connections."""
    with attacked(SECRET, limits={"connections": PLACES}) as attacked_server:
        yield attacked_server


BAD = {
    "a body that does not come": (handshake(b"Content-Length: 100\r\n"), 400),
    "a body": (handshake(b"Content-Length: 2\r\n") + b"{}", 400),
    "chunks": (handshake(b"Transfer-Encoding: chunked\r\n"), 400),
    "too many headers": (handshake(b"".join(b"X-%d: a\r\n" % n for n in range(300))), 431),
    "a header too large": (handshake(b"X: " + b"a" * 70_000 + b"\r\n"), 431),
    "HTTP/1.0": (handshake(line=LINE.replace(b"1.1", b"1.0")), 400),
    "POST": (handshake(line=LINE.replace(b"GET", b"POST")), 400),
    "no key": (handshake(headers=VERSION), 400),
    "a short key": (handshake(headers=VERSION + b"Sec-WebSocket-Key: YQ==\r\n"), 400),
    "a key that is none": (handshake(headers=VERSION + b"Sec-WebSocket-Key: \xff*\r\n"), 400),
    "two keys": (handshake(KEY), 400),
    "no version": (handshake(headers=KEY), 400),
    "an old version": (handshake(headers=KEY + b"Sec-WebSocket-Version: 8\r\n"), 400),
    "two versions": (handshake(b"Sec-WebSocket-Version: 8\r\n"), 400),
}


@pytest.mark.parametrize("name", BAD)
def test_a_handshake_that_is_none_is_answered_at_once(server: AttackedServer, name: str) -> None:
    sent, status = BAD[name]
    with Raw(server.url) as raw:
        raw.send(sent)
        (reply,) = raw.replies()
    assert reply.status == status
    assert reply.error["code"] == ("head_too_large" if status == 431 else "invalid_handshake")


def test_which_version_there_is_can_be_read(server: AttackedServer) -> None:
    with Raw(server.url) as raw:
        raw.send(BAD["an old version"][0])
        assert b"\r\nsec-websocket-version: 13\r\n" in raw.rest()


@pytest.mark.parametrize(
    "more",
    [
        b"".join(b"X-%d: a\r\n" % number for number in range(200)),
        b"X: " + b"a" * 20_000 + b"\r\n",
        b"Content-Length: 0\r\n",
        b"Sec-WebSocket-Extensions: permessage-deflate\r\n",
        b"Sec-WebSocket-Protocol: a, b\r\n",
    ],
    ids=["many headers", "a large one", "no body", "compression", "subprotocols"],
)
def test_a_handshake_is_read_once_and_agrees_to_nothing_else(server: AttackedServer, more: bytes) -> None:
    with Raw(server.url) as raw:
        raw.send(handshake(more) + frame(PING, b"there?"))
        data = b""
        while b"there?" not in data:
            data += raw.socket.recv(1000)
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ") and b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head
    assert b"sec-websocket-extensions" not in head.lower() and b"protocol:" not in head.lower()
    assert rest == bytes([0x80 | PONG, 6]) + b"there?"


def test_a_handshake_behind_a_request_that_runs_ends_both(server: AttackedServer) -> None:
    with Raw(server.url) as raw:
        raw.send(get() + handshake())
        statuses = [reply.status for reply in raw.replies()]
    assert statuses in ([200], [])


def test_a_refused_handshake_is_the_end(keyed: AttackedServer) -> None:
    with Raw(keyed.url) as raw:
        raw.send(handshake() + get())
        assert [reply.status for reply in raw.replies()] == [401]


HALVES = {
    "nothing": b"",
    "half a head": b"GET /v1/responses HTTP/1.1\r\n",
    "half a handshake": handshake()[:-2],
    "health": get(),
    "a wrong key": get(b"GET /v1/models HTTP/1.1\r\n"),
}


@pytest.mark.parametrize("name", HALVES)
def test_strangers_keep_out_nobody_who_has_a_key(keyed: AttackedServer, name: str) -> None:
    with ExitStack() as stack:
        for _ in range(4 * PLACES):
            stack.enter_context(Raw(keyed.url)).send(HALVES[name])
        with httpx.Client(base_url=keyed.url, headers={"x-api-key": SECRET}, timeout=60) as client:
            for _ in range(3):
                assert client.get("/v1/models").status_code == 200


def test_connections_that_rest_give_way_to_others(keyed: AttackedServer) -> None:
    head = b"Host: localhost\r\nAuthorization: Bearer %s\r\n" % SECRET.encode()
    with ExitStack() as stack:
        for _ in range(2 * PLACES):
            raw = stack.enter_context(Raw(keyed.url))
            raw.send(get(b"GET /v1/models HTTP/1.1\r\n", head))
            assert raw.replies(1)[0].status == 200


def test_the_connections_of_one_key_leave_room_for_another() -> None:
    limits = {"connections": PLACES}
    with attacked(api_key=[SECRET, OTHER], limits=limits, interval=0.01) as server, ExitStack() as stack:
        mine = [stack.enter_context(RawSocket(server.url, SECRET)) for _ in range(PLACES // 4)]
        assert len(mine) == PLACES // 4
        with Raw(server.url) as raw:
            raw.send(handshake(b"Authorization: Bearer %s\r\n" % SECRET.encode()))
            (reply,) = raw.replies()
        assert (reply.status, reply.error["code"]) == (429, "overloaded")
        with RawSocket(server.url, OTHER) as theirs:
            assert theirs.head.startswith(b"HTTP/1.1 101")
        mine[0].socket.close()
        assert becomes(lambda: _opens(server.url))


def _opens(url: str) -> bool:
    with RawSocket(url, SECRET) as one:
        return one.head.startswith(b"HTTP/1.1 101")
