"""WebSocket by hand: handshakes and frames as no library would send them."""

import json
import struct
from typing import Any

from tests.attacks.raw_messages import HOST
from tests.attacks.raw_socket import Raw

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
FIN = 0x80
KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
VERSION = b"Sec-WebSocket-Version: 13\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
LINE = b"GET /v1/responses HTTP/1.1\r\n"


def handshake(more: bytes = b"", *, line: bytes = LINE, headers: bytes = KEY + VERSION) -> bytes:
    return line + HOST + UPGRADE + headers + more + b"\r\n"


def frame(kind: int, data: bytes = b"", *, head: int = FIN, masked: bool = True) -> bytes:
    """Masked with zeros, so that the data can be read; `head` are the bits before the kind."""
    mask = FIN if masked else 0
    if len(data) < 126:
        size = bytes([mask | len(data)])
    elif len(data) < 65536:
        size = bytes([mask | 126]) + struct.pack("!H", len(data))
    else:
        size = bytes([mask | 127]) + struct.pack("!Q", len(data))
    return bytes([head | kind]) + size + (bytes(4) if masked else b"") + data


class RawSocket(Raw):
    """A WebSocket that is open."""

    def __init__(self, url: str, key: str | None = None, receive_bytes: int = 0) -> None:
        super().__init__(url, receive_bytes)
        self.send(handshake(f"Authorization: Bearer {key}\r\n".encode() if key else b""))
        self._said = b""
        while b"\r\n\r\n" not in self._said:
            self._more()
        self.head, _, self._said = self._said.partition(b"\r\n\r\n")

    def frame(self) -> tuple[int, bytes]:
        """The kind and the data of the next."""
        kind = self._bytes(1)[0] & 15
        size = self._bytes(1)[0]
        if size == 126:
            (size,) = struct.unpack("!H", self._bytes(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", self._bytes(8))
        return kind, self._bytes(size)

    def event(self) -> dict[str, Any]:
        """The next that is no ping or pong."""
        while (pair := self.frame())[0] not in (TEXT, BINARY):
            assert pair[0] != CLOSE, pair
        event: dict[str, Any] = json.loads(pair[1])
        return event

    def closed(self) -> int:
        """The code with which the server closes it, whatever it says before; then nothing more comes."""
        while (pair := self.frame())[0] != CLOSE:
            pass
        assert not self._said and self.rest() == b""
        code: int = struct.unpack("!H", pair[1][:2])[0]
        return code

    def _bytes(self, count: int) -> bytes:
        while len(self._said) < count:
            self._more()
        data, self._said = self._said[:count], self._said[count:]
        return data

    def _more(self) -> None:
        data = self.socket.recv(65536)
        assert data, f"closed after {self._said!r}"
        self._said += data
