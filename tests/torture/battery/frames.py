"""Frames of a WebSocket: one that is large, and many that are small."""

import base64
import json
import socket
import struct
from collections.abc import Callable, Iterator

from tests.attacks.frame import AttackedServer
from tests.torture.battery.case import LIMITS, Case, Shot

ROUTE = "WEBSOCKET /v1/responses"
TEXT, CONTINUED, PING, PONG = 1, 0, 9, 10
SMALL = json.dumps({"type": "response.processed"}).encode()
CREATE = json.dumps(
    {"type": "response.create", "model": "parrot", "input": "hi", "max_output_tokens": 1}
).encode()

HEAD = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + base64.b64encode(bytes(16)) + b"\r\n\r\n"
)


def cases() -> Iterator[Case]:
    huge = LIMITS.body_bytes - 100
    for name, sent in (
        ("one message of 16 MB", lambda: frame(TEXT, b" " * huge)),
        ("one message of 16 MB and a little more", lambda: frame(TEXT, b" " * (huge + 4096))),
        ("a message of 16 MB in pieces of 1 KB", lambda: _pieces(b" " * huge, 1024)),
        ("a message of 500,000 pieces of a byte", lambda: _pieces(b" " * 500_000, 1)),
        (
            "a million pieces of nothing",
            lambda: frame(TEXT, b"{", last=False) + frame(CONTINUED, b"", last=False) * 1_000_000,
        ),
        ("100,000 small messages", lambda: frame(TEXT, SMALL) * 100_000),
        ("10,000 messages that are no JSON", lambda: frame(TEXT, b"a") * 10_000),
        ("1,000 requests", lambda: frame(TEXT, CREATE) * 1_000),
        ("100,000 pings", lambda: frame(PING, b"a" * 125) * 100_000),
        ("100,000 pongs", lambda: frame(PONG, b"a" * 125) * 100_000),
        ("a message that is no UTF-8", lambda: frame(TEXT, b"\xff" * huge)),
    ):
        yield Case(ROUTE, name, _sent(sent))


def frame(kind: int, payload: bytes, *, last: bool = True) -> bytes:
    """Masked with zeros, as which it may be sent."""
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 65536:
        length = bytes([0x80 | 126]) + struct.pack(">H", size)
    else:
        length = bytes([0x80 | 127]) + struct.pack(">Q", size)
    return bytes([(0x80 if last else 0) | kind]) + length + bytes(4) + payload


def _pieces(message: bytes, size: int) -> bytes:
    cut = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(
        frame(CONTINUED if number else TEXT, piece, last=number == len(cut) - 1)
        for number, piece in enumerate(cut)
    )


def _sent(make: Callable[[], bytes]) -> Callable[[AttackedServer], Shot]:
    def ready(server: AttackedServer) -> Shot:
        raw = make()
        return lambda: _shoot(server, raw)

    return ready


def _shoot(server: AttackedServer, raw: bytes) -> int:
    """Sends it all, and reads until nothing more comes. 101 if the server put up with it."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30.0) as connection:
        connection.sendall(HEAD)
        status = int(connection.recv(4096).split(b" ", 2)[1])
        connection.settimeout(2.0)
        try:
            connection.sendall(raw)
            while connection.recv(1 << 16):
                pass
        except (TimeoutError, ConnectionError):
            pass
    return status
