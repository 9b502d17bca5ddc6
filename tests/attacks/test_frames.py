"""Frames on a WebSocket: what is none ends it, and no number of them holds up others."""

import json
import struct
from collections.abc import Iterator

import pytest

from dragoman.http.connection.websocket import FEW_FRAMES, LEAST_FRAME, MOST_CONTROLS
from tests.attacks.bodies import good
from tests.attacks.frame import AttackedServer, attacked, healthy
from tests.attacks.raw_frames import BINARY, CLOSE, CONTINUATION, FIN, PING, PONG, TEXT, RawSocket, frame
from tests.attacks.raw_socket import held
from tests.support.wait import becomes

MB = 1024 * 1024
CREATE = json.dumps({"type": "response.create", "input": "hi"}).encode()
SOON_S = 0.5


@pytest.fixture(scope="module")
def server() -> Iterator[AttackedServer]:
    with attacked(
        write_timeout=SOON_S, limits={"body_bytes": 4 * MB, "bodies_bytes": 6 * MB}
    ) as attacked_server:
        yield attacked_server


@pytest.fixture(autouse=True)
def goes_on(server: AttackedServer) -> Iterator[None]:
    """Whatever one socket does, all others are answered, meanwhile and after it."""
    with healthy(server):
        yield
    reply = server.send("/v1/chat/completions", good("/v1/chat/completions"))
    assert reply.status == 200


WRONG = {
    "not masked": frame(TEXT, CREATE, masked=False),
    "the bit of compression": frame(TEXT, CREATE, head=FIN | 0x40),
    "the second reserved bit": frame(TEXT, CREATE, head=FIN | 0x20),
    "the third reserved bit": frame(TEXT, CREATE, head=FIN | 0x10),
    "a kind that is none": frame(3, CREATE),
    "a control that is none": frame(11),
    "a long ping": frame(PING, b"a" * 126),
    "a long close": frame(CLOSE, b"\x03\xe8" + b"a" * 126),
    "half a ping": frame(PING, b"a", head=0),
    "a close of one byte": frame(CLOSE, b"a"),
    "a close with a code that is none": frame(CLOSE, struct.pack("!H", 999)),
    "the end of nothing": frame(CONTINUATION, b"a"),
    "a message within a message": frame(TEXT, b"{", head=0) + frame(TEXT, CREATE),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_frame_that_is_none_ends_the_socket(server: AttackedServer, name: str) -> None:
    with RawSocket(server.url) as socket:
        socket.send(WRONG[name] + frame(TEXT, CREATE))
        assert socket.closed() == 1002


def test_a_frame_that_says_it_is_huge_is_not_waited_for(server: AttackedServer) -> None:
    before = server.memory()
    with RawSocket(server.url) as socket:
        socket.send(bytes([FIN | TEXT, FIN | 127]) + struct.pack("!Q", 2**62) + bytes(4))
        assert socket.closed() == 1009
    assert server.memory() - before < 16 * MB


def test_a_message_that_never_ends_is_cut(server: AttackedServer) -> None:
    with RawSocket(server.url) as socket:
        socket.send(frame(TEXT, b" ", head=0))
        for _ in range(8):
            socket.send(frame(CONTINUATION, b" " * MB, head=0))
        assert socket.closed() == 1009


@pytest.mark.parametrize("data", [b"", b" "], ids=["empty", "of a byte"])
def test_a_message_of_ever_more_frames_is_cut(server: AttackedServer, data: bytes) -> None:
    with RawSocket(server.url) as socket:
        socket.send(frame(TEXT, head=0) + 10 * FEW_FRAMES * frame(CONTINUATION, data, head=0))
        assert socket.closed() == 1009


def test_a_message_in_many_frames_is_read(server: AttackedServer) -> None:
    pieces = [CREATE[at : at + 1] for at in range(len(CREATE))]
    with RawSocket(server.url) as socket:
        socket.send(frame(TEXT, head=0) + b"".join(frame(CONTINUATION, one, head=0) for one in pieces))
        socket.send(frame(PING, b"a") + frame(CONTINUATION))
        assert socket.event()["type"] == "response.created"


def test_a_large_message_in_many_frames_is_read(server: AttackedServer) -> None:
    pieces = 8 * FEW_FRAMES * frame(CONTINUATION, b" " * LEAST_FRAME, head=0)
    with RawSocket(server.url) as socket:
        socket.send(frame(TEXT, head=0) + pieces + frame(CONTINUATION, CREATE))
        assert socket.event()["type"] == "response.created"


@pytest.mark.parametrize("kind", [PING, PONG])
def test_a_flood_of_pings_is_cut(server: AttackedServer, kind: int) -> None:
    with RawSocket(server.url) as socket:
        socket.send(1000 * MOST_CONTROLS * frame(kind, b"a" * 125))
        assert socket.closed() == 1008


def test_errors_that_are_not_read_end_the_socket(server: AttackedServer) -> None:
    before = server.memory()
    with RawSocket(server.url, receive_bytes=4096) as socket:
        own = socket.socket.getsockname()[1]
        socket.socket.settimeout(0.1)
        for _ in range(100):
            try:
                socket.send(1000 * frame(TEXT, b"{"))
            except TimeoutError:
                break
        assert becomes(lambda: own not in [one.port for one in held(server.process.pid)])
    assert server.memory() - before < 16 * MB


def test_a_close_is_answered_and_no_answer_is_waited_for(server: AttackedServer) -> None:
    with RawSocket(server.url) as socket:
        socket.send(frame(CLOSE, struct.pack("!H", 1000)) + frame(TEXT, CREATE))
        assert socket.closed() == 1000


@pytest.mark.parametrize("kind", [TEXT, BINARY])
@pytest.mark.parametrize("size", [10, MB], ids=["small", "large"])
def test_a_message_that_is_no_text_is_refused(server: AttackedServer, kind: int, size: int) -> None:
    with RawSocket(server.url) as socket:
        data = b'{"type": "response.create", "input": "' + b"a" * size
        socket.send(frame(kind, data, head=0) + frame(CONTINUATION, b"\xff\xfe", head=0))
        socket.send(frame(CONTINUATION, b'"}'))
        event = socket.event()
        assert (event["type"], event["code"]) == ("error", "invalid_json")
        socket.send(frame(TEXT, CREATE))
        assert socket.event()["type"] == "response.created"


def test_unfinished_messages_have_one_budget(server: AttackedServer) -> None:
    """The third of these has no room left; when the others are gone there is."""
    with RawSocket(server.url) as one, RawSocket(server.url) as two, RawSocket(server.url) as three:
        for socket in (one, two):
            socket.send(frame(TEXT, b" " * (3 * MB - 100_000), head=0) + frame(PING))
            assert socket.frame()[0] == PONG
        three.send(frame(TEXT, b" " * MB, head=0))
        assert three.closed() == 1013
    assert becomes(lambda: _answers(server.url, b" " * 3 * MB + CREATE))


def _answers(url: str, message: bytes) -> bool:
    with RawSocket(url) as socket:
        socket.send(frame(TEXT, message))
        return socket.frame()[0] == TEXT
